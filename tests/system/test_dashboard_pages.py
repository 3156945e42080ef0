"""`speclen dashboard`: packaged queries and charts work on a real database, read-only."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from speclen.cli.dashboard import METADATA, address, create_application
from speclen.cli.support.output import UserError
from speclen.store.schema import Commit
from tests.support.database_rows import write_database
from tests.support.store_rows import TRIAL, context, estimate, moment, rows, written

pytest.importorskip("datasette_dashboards", reason="needs pip install 'speclen[inspect]'")

from datasette.utils import parse_metadata

PACKAGED = parse_metadata(METADATA.read_text())
QUERIES = PACKAGED["databases"]["speclen"]["queries"]
PAGES = PACKAGED["plugins"]["datasette-dashboards"]
CHARTS = {f"{page}/{name}": chart for page, content in PAGES.items() for name, chart in content["charts"].items()}
DRAWN = sorted(name for name, chart in CHARTS.items() if chart["library"] == "vega-lite")


@pytest.fixture
def database(tmp_path):
    return written(write_database(tmp_path / "any name.db"), moment([], trials=[TRIAL]))


def get(database: Path, path: str, status: int = 200, **parameters: object) -> list[dict]:
    """Rows of an answer."""
    request = create_application(database).client.get(path, params={"_shape": "array", **parameters})
    response = asyncio.run(request)
    assert response.status_code == status, response.text
    return response.json()


def test_canned_queries_run_and_return_the_documented_rows(database):
    for name in QUERIES:
        get(database, f"/speclen/{name}.json", batch_size=4)
    best = get(database, "/speclen/best_arms.json")
    found = [(row["batch_bucket"], row["arm"], row["speedup"]) for row in best]
    assert found == [("1-2", "plain", 1.0), ("3-4", "draft 2", 2.0)]
    assert [row["reason"] for row in get(database, "/speclen/why.json", batch_size=4)] == ["a test"]
    assert get(database, "/speclen/why.json", batch_size=5) == []
    accepted = get(database, "/speclen/acceptance_by_load.json")
    assert [(row["num_steps"], row["acceptance_rate"]) for row in accepted] == [(3, 0.5)]


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("context", ["", "t + d on cpu:test, float32"])
def test_every_chart_has_the_fields_that_it_draws(database, name, context):
    connection_rows = chart_rows(database, CHARTS[name], context)
    assert connection_rows, "the chart would be empty"
    for field in fields_of(CHARTS[name]["display"]):
        assert field in connection_rows[0], f"{name} draws {field}, which its query does not give"


def chart_rows(database: Path, chart: dict, context: str) -> list[dict]:
    """Rows as the page's script requests them, with or without the filter's part of the query."""
    query = re.sub(r"\[\[(.*?)\]\]", r"\1" if context else "", chart["query"])
    return get(database, "/speclen.json", sql=query, context=context)


def fields_of(display: object) -> set[str]:
    """Every field that a chart's description mentions."""
    if isinstance(display, list):
        return set().union(*map(fields_of, display))
    if not isinstance(display, dict):
        return set()
    nested = set().union(*map(fields_of, display.values()), set())
    return nested | ({display["field"]} if "field" in display else set())


def test_the_dashboard_cannot_write(database):
    get(database, "/speclen.json", status=400, sql="delete from step_reports")
    assert rows(database, "SELECT count(*) FROM step_reports") == [(3,)]


@pytest.mark.parametrize(
    ("listen", "insecure", "expected"),
    [
        ("127.0.0.1:8001", False, ("127.0.0.1", 8001)),
        ("[::1]:8001", False, ("::1", 8001)),
        ("0.0.0.0:8001", True, ("0.0.0.0", 8001)),
        ("0.0.0.0:8001", False, "without a password"),
        ("8001", False, "is not HOST:PORT"),
    ],
)
def test_an_address_beyond_loopback_needs_insecure(listen, insecure, expected):
    if isinstance(expected, tuple):
        assert address(listen, insecure) == expected
    else:
        with pytest.raises(UserError, match=expected):
            address(listen, insecure)


def test_text_from_workers_is_escaped_in_html(tmp_path):
    """Only tables render text as HTML: vega-lite draws it, and the Markdown is our own."""
    hostile = context(device="<b>", target="<b>")
    written(tmp_path / "s.db", Commit(contexts=[hostile], arm_estimates=[estimate(is_best=True)]))
    tables = [chart for chart in CHARTS.values() if chart["library"] not in ("vega-lite", "markdown")]
    assert [chart["library"] for chart in tables] == ["table"]
    shown = chart_rows(tmp_path / "s.db", tables[0], "")
    assert shown
    assert "<" not in json.dumps(shown)
    page = asyncio.run(create_application(tmp_path / "s.db").client.get("/speclen/learned_table")).text
    assert "&lt;b&gt; + d on" in page
    assert "<b>" not in page
