"""`speclen dashboard`: packaged queries and charts work on a real database, read-only."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from speclen.cli.dashboard import METADATA, address, create_application
from speclen.cli.support.errors import UserError
from speclen.store.records import Commit
from tests.support.database_rows import write_database
from tests.support.store_rows import context, estimate, rows, written

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
    with pytest.raises(UserError, match="there is no database"):
        create_application(tmp_path / "none.db")


def test_no_text_of_a_worker_is_taken_for_html(tmp_path):
    """Tables take text for HTML; vega-lite draws text, and Markdown is ours alone."""
    hostile = context(device="<b>", target="<b>")
    written(tmp_path / "s.db", Commit(contexts=[hostile], arm_estimates=[estimate(is_best=True)]))
    tables = [chart for chart in CHARTS.values() if chart["library"] not in ("vega-lite", "markdown")]
    assert [chart["library"] for chart in tables] == ["table"]
    shown = chart_rows(tmp_path / "s.db", tables[0], "")
    assert shown
    assert "<" not in json.dumps(shown)
