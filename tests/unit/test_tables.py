"""`speclen tables` and `top`: one line per range of batch sizes for people, the rows of the view for programs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.cli.learned.top import range_of
from speclen.cli.support.errors import UserError
from speclen.store.records import Commit
from speclen.v1 import control_pb2
from tests.support.database_rows import write_database
from tests.support.store_rows import context, estimate, rows, written


@pytest.fixture
def database(tmp_path):
    return write_database(tmp_path / "s.db")


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, ["tables", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_range_has_a_line_under_the_name_of_its_context(database):
    title, heading, *lines = run("--db", str(database)).splitlines()
    assert title == "t + d on cpu:test, float32"
    assert heading.split() == ["batch", "arm", "ms/token", "95%", "interval", "vs", "plain", "steps", "age"]
    plain, (*drafted, age) = (line.split() for line in lines)
    assert plain == ["1-2", "plain", "10", "9", "to", "11", "1.00x", "7"]
    assert drafted == ["3-4", "draft", "2", "10", "9", "to", "11", "2.00x", "1,200"]
    assert age.removesuffix("m").isdigit()  # how long ago depends on when the fixture was written


def test_json_is_the_rows_of_the_view(database):
    expected = rows(database, "SELECT * FROM choices")
    assert len(expected) == 2
    assert [tuple(row.values()) for row in json.loads(run("--db", str(database), "--json"))] == expected


def test_contexts_can_be_picked(database):
    written(database, Commit(contexts=[context(2, "gpu")], arm_estimates=[estimate(context_id=2, is_best=True)]))
    assert run("--db", str(database), "--context", "gpu").splitlines()[0] == "t + d on gpu, float32"
    with pytest.raises(UserError, match=r"no context contains 'tpu'; known are: t \+ d on cpu:test, .*; t \+ d on gpu"):
        CliRunner().invoke(app, ["tables", "--db", str(database), "--context", "tpu"], catch_exceptions=False)


def test_an_empty_database_says_what_to_do(tmp_path):
    written(tmp_path / "s.db")
    assert "start a worker" in run("--db", str(tmp_path / "s.db"))
    assert run("--db", str(tmp_path / "s.db"), "--json").strip() == "[]"


def test_contradictory_flags_and_missing_files_are_refused(database, tmp_path):
    for arguments, words in [
        (["--db", str(database), "--json", "--watch"], "exclude each other"),
        (["--db", str(tmp_path / "none.db")], "there is no database at"),
        (["--db", __file__], "is damaged"),
    ]:
        result = CliRunner().invoke(app, ["tables", *arguments])
        assert isinstance(result.exception, UserError)
        assert words in str(result.exception)


def test_top_shows_the_ranges_that_a_worker_has():
    arms = [(1, 4, 2, True, 1.0), (5, 5, 1, False, 1.6), (6, 9, 0, False, None)]
    choices = [
        control_pb2.BucketChoice(batch_min=low, batch_max=high, speculation_length=length, ngram=ngram, ms_per_token=ms)
        for low, high, length, ngram, ms in arms
    ]
    assert [(*map(range_of(choice).get, ("batch_bucket", "arm", "ms_per_token")),) for choice in choices] == [
        ("1-4", "n-gram else draft 2", pytest.approx(1.0)),
        ("5", "draft 1", pytest.approx(1.6)),
        ("6-9", "plain", None),
    ]
