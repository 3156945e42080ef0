"""`speclen dashboard`: every page, query and chart that is packaged works on a real database, live and read-only."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from speclen.cli.dashboard import METADATA, address, create_application
from speclen.cli.support.errors import UserError
from speclen.store.database import Store
from speclen.store.records import Commit
from tests.support.database_rows import write_database
from tests.support.store_rows import NOW, context, decision, estimate, report, rows, store_now

pytest.importorskip("datasette_dashboards", reason="needs pip install 'speclen[inspect]'")

from datasette.utils import parse_metadata

PACKAGED = parse_metadata(METADATA.read_text())
QUERIES = PACKAGED["databases"]["speclen"]["queries"]
PAGES = PACKAGED["plugins"]["datasette-dashboards"]
CHARTS = {f"{page}/{name}": chart for page, content in PAGES.items() for name, chart in content["charts"].items()}
DRAWN = sorted(name for name, chart in CHARTS.items() if chart["library"] == "vega-lite")


@pytest.fixture
def database(tmp_path):
    return write_database(tmp_path / "any name.db")


def get(database: Path, path: str) -> tuple[int, str]:
    async def fetch() -> tuple[int, str]:
        response = await create_application(database).client.get(path)
        return response.status_code, response.text

    return asyncio.run(fetch())


@pytest.mark.parametrize("name", sorted(QUERIES))
def test_every_canned_query_runs(database, name):
    status, body = get(database, f"/speclen/{name}.json?_shape=objects&batch_size=4")
    assert status == 200, body
    assert json.loads(body)["ok"] is True


def test_canned_queries_answer_what_they_promise(database):
    _, body = get(database, "/speclen/best_arms.json?_shape=array")
    assert [(row["batch_bucket"], row["arm"], row["speedup"]) for row in json.loads(body)] == [
        ("1-2", "plain", 1.0),
        ("3-4", "draft 2", 2.0),
    ]
    _, body = get(database, "/speclen/why.json?_shape=array&batch_size=4")
    assert [row["reason"] for row in json.loads(body)] == ["a test"]
    _, body = get(database, "/speclen/why.json?_shape=array&batch_size=5")
    assert json.loads(body) == []
    _, body = get(database, "/speclen/acceptance_by_load.json?_shape=array")
    assert [(row["num_steps"], row["acceptance_rate"]) for row in json.loads(body)] == [(3, 0.5)]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("context", ["", "t + d on cpu:test, float32"])
def test_every_chart_has_the_fields_that_it_draws(database, name, context):
    connection_rows = chart_rows(database, CHARTS[name], context)
    assert connection_rows, "the chart would be empty"
    for field in fields_of(CHARTS[name]["display"]):
        assert field in connection_rows[0], f"{name} draws {field}, which its query does not give"


def chart_rows(database: Path, chart: dict, context: str) -> list[dict]:
    """The rows as the page's script asks for them: with the filter's part of the query, or without it."""
    query = re.sub(r"\[\[(.*?)\]\]", r"\1" if context else "", chart["query"])

    async def fetch() -> list[dict]:
        parameters = {"sql": query, "_shape": "array", "context": context}
        response = await create_application(database).client.get("/speclen.json", params=parameters)
        assert response.status_code == 200, response.text
        return response.json()

    return asyncio.run(fetch())


def fields_of(display: object) -> set[str]:
    """Every field that a chart's description mentions."""
    if isinstance(display, list):
        return set().union(*map(fields_of, display))
    if not isinstance(display, dict):
        return set()
    nested = set().union(*map(fields_of, display.values()), set())
    return nested | ({display["field"]} if "field" in display else set())


@pytest.mark.parametrize("view", ["learned_table", "current_choice", "prediction_error", "step_reports"])
def test_pages_follow_the_controller(database, view):
    store = Store.open(database)
    _, before = get(database, f"/speclen/{view}.json?_shape=array")
    changes = {"arm_estimates": [estimate(2, step_s=0.5, is_best=True)], "reports": [report(4, latency_s=0.5)]}
    assert store_now(store, Commit(**changes)) is None
    _, after = get(database, f"/speclen/{view}.json?_shape=array")
    store.close()
    assert json.loads(before) != json.loads(after)


def test_nothing_can_be_written_through_it(database):
    status, _ = get(database, "/speclen.json?sql=delete+from+step_reports")
    assert status == 400
    assert rows(database, "SELECT count(*) FROM step_reports") == [(3,)]


@pytest.mark.parametrize(
    ("listen", "insecure", "expected"),
    [
        ("127.0.0.1:8001", False, ("127.0.0.1", 8001)),
        ("[::1]:8001", False, ("::1", 8001)),
        ("0.0.0.0:8001", True, ("0.0.0.0", 8001)),
        ("0.0.0.0:8001", False, "has no passwords"),
        ("8001", False, "is not HOST:PORT"),
        ("localhost:http", False, "is not HOST:PORT"),
        ("localhost:70000", False, "is not HOST:PORT"),
    ],
)
def test_addresses(listen, insecure, expected):
    if isinstance(expected, tuple):
        assert address(listen, insecure) == expected
    else:
        with pytest.raises(UserError, match=expected):
            address(listen, insecure)


def test_a_missing_database_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="There is no database"):
        create_application(tmp_path / "none.db")


@contextmanager
def serving(database: Path, port: int):
    script = (
        "import sys; from pathlib import Path; from speclen.cli.dashboard import dashboard; "
        "dashboard(Path(sys.argv[1]), sys.argv[2])"
    )
    command = [sys.executable, "-c", script.replace("sys.argv[2])", "sys.argv[2], False, False)"), str(database)]
    with subprocess.Popen([*command, f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The first page of a dashboard in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(write_database(tmp_path_factory.mktemp("site") / "any name.db"), port) as page:
        wait_until_open(page)
        yield page


def test_a_taken_port_is_one_sentence(database, site):
    taken = site.split("/")[2]
    options = ["dashboard", "--db", str(database), "--listen", taken]
    command = [sys.executable, "-m", "speclen.cli.app", *options]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"cannot listen on {taken}: choose another" in second.stderr


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", [800, 1280])
def test_a_browser_draws_every_chart(site, tmp_path, page, width):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += (
        f" --disable-component-update --disable-sync --virtual-time-budget=20000 --dump-dom --window-size={width},900"
    )
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'chromium'}", site.replace("learned", page)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    for name in (name.partition("/")[2] for name in DRAWN if name.startswith(f"{page}/")):
        drawn = shown.split(f'id="chart-{name}"')[1].split('id="chart-')[0]
        assert re.search(r'role-mark[^>]*>\s*<(path[^>]* d="M|line )', drawn), f"{name} was not drawn"


def test_no_text_of_a_worker_is_taken_for_html(tmp_path):
    """Tables take text for HTML; vega-lite draws text, and Markdown is ours alone."""
    hostile = context(device="<b>", target="<b>")
    store = Store.open(tmp_path / "s.db")
    assert store_now(store, Commit(contexts=[hostile], arm_estimates=[estimate(is_best=True)])) is None
    store.close()
    tables = [chart for chart in CHARTS.values() if chart["library"] not in ("vega-lite", "markdown")]
    assert [chart["library"] for chart in tables] == ["table"]
    shown = chart_rows(tmp_path / "s.db", tables[0], "")
    assert shown
    assert "<" not in json.dumps(shown)


@pytest.mark.parametrize("page", PAGES)
def test_every_chart_has_its_place_and_every_page_leads_to_the_others(page):
    placed = {name for row in PAGES[page]["layout"] for name in row}
    assert placed == {*PAGES[page]["charts"]}
    assert PAGES[page]["settings"]["autorefresh"] == 1
    links = set(re.findall(r"/-/dashboards/(\w+)", PAGES[page]["charts"]["pages"]["display"]))
    assert links == {*PAGES} - {page}


def wait_until_open(page: str) -> None:
    """The address is printed just before the port opens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(page, timeout=30):
                return
        except OSError:
            assert time.monotonic() < deadline, "the pages never came"
            time.sleep(0.1)


def test_a_wide_interval_does_not_flatten_the_curves(database, tmp_path):
    """A range that was hardly measured has an interval many times its value: the axis follows the curves, not it."""
    wide = tmp_path / "wide.db"
    shutil.copy(database, wide)
    with sqlite3.connect(wide) as connection:
        connection.execute("UPDATE arm_estimates SET ms_per_token_high = 1e6, ms_per_token_low = 0 WHERE batch_min > 1")
    query = re.sub(r"\[\[.*?\]\]", "", CHARTS["learned/curves"]["query"])
    with sqlite3.connect(wide) as connection:
        shown = connection.execute(f"SELECT max(high), max(gain), min(low), min(gain) FROM ({query})")
        high, most, low, least = shown.fetchone()
    assert high <= 1.25 * most
    assert low >= 0.8 * least > 0


def test_an_arm_with_n_grams_is_shown_where_it_is_in_use(database):
    used = estimate(0, ngram=True, step_s=0.012, expected_tokens=4.0, is_best=True)
    previous = {"previous_speculation_length": 2, "previous_ngram": False}
    change = decision(2, 0, ngram=True, decided_at=NOW + 1, **previous)
    store = Store.open(database)
    rows = [used, estimate(2, is_best=False)]
    assert store_now(store, Commit(arm_estimates=rows, decisions=[change])) is None
    store.close()
    newest, *_ = chart_rows(database, CHARTS["learned/arms"], "")
    assert (newest["size"], newest["arm"]) == (4, "n-gram")
    now = chart_rows(database, CHARTS["learned/now"], "")
    assert [(row["batch"], row["arm"], row["vs plain"]) for row in now] == [
        ("1-2", "plain", "1.00x"),
        ("3-4", "n-gram", "6.67x"),
    ]
    table = {(row["size"], row["arm"]): row for row in chart_rows(database, CHARTS["learned/table"], "")}
    assert table[4, "draft 2"]["slower_percent"] == 50, "10 ms per token against 3"
    assert [key for key, row in table.items() if row["in_use"]] == [(1, "plain"), (2, "plain"), (4, "n-gram")]
    assert {row["size"] for row in chart_rows(database, CHARTS["learned/curves"], "") if row["in_use"]} == {1, 2}


def test_arms_are_shown_from_when_to_when(database):
    """One bar from each change to the next, the last one until now; a batch size stands for the range that holds it."""
    store = Store.open(database)
    previous = {"previous_speculation_length": 2, "previous_ngram": False}
    assert store_now(store, Commit(decisions=[decision(2, 1, decided_at=NOW + 0.001, **previous)])) is None
    store.close()
    last, first = [bar for bar in chart_rows(database, CHARTS["learned/arms"], "") if bar["size"] == 4]
    assert (first["arm"], last["arm"]) == ("draft 2", "draft 1")
    assert first["until"] == last["since"] < last["until"]
