"""docs/store.md shows what its queries really print, and names what really exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_database import write_example
from tabulate import tabulate

from speclen.store.connection import sqlite3
from speclen.store.failpoints import FAILPOINTS
from speclen.store.retention import Retention

DOCUMENT = (Path(__file__).parent.parent / "docs" / "store.md").read_text()
EXAMPLES = re.findall(r"```sql\n(.*?)```\n+```text\n(.*?)```", DOCUMENT, re.DOTALL)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("docs") / "speclen.db")


def printed(path: Path, query: str) -> str:
    """What `sqlite-utils query FILE QUERY --table` prints."""
    connection = sqlite3.connect(path)
    cursor = connection.execute(query)
    text = tabulate(cursor.fetchall(), headers=[column[0] for column in cursor.description])
    connection.close()
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def test_there_are_examples():
    assert len(EXAMPLES) >= 6
    assert DOCUMENT.count("```sql") == len(EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_the_document_says(database, number):
    query, output = EXAMPLES[number]
    assert printed(database, query) == output


def test_every_table_and_view_is_described_and_no_other(database):
    query = "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE '%sqlite%' ORDER BY 1"
    connection = sqlite3.connect(database)
    existing = [row[0] for row in connection.execute(query)]
    connection.close()
    assert sorted(re.findall(r"^\| `([a-z_]+)` \|", DOCUMENT, re.MULTILINE)) == existing


def test_defaults_and_failpoints_are_the_ones_of_the_code():
    defaults = Retention()
    assert f"{defaults.max_report_rows:,} reports" in DOCUMENT
    assert f"{defaults.max_days:g} days" in DOCUMENT
    assert f"{defaults.max_prediction_days:g} days of `prediction_error`" in DOCUMENT
    for name in FAILPOINTS:
        assert f"`{name}`" in DOCUMENT
