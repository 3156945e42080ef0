"""`speclen gain` and `hold`: the measured gain in words, and arms that people hold."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.cli.gain import seconds_of
from speclen.cli.support.output import UserError
from speclen.store.schema import HoldsRow
from tests.support.database_rows import write_database
from tests.support.store_rows import NOW, TRIAL, moment, rows, written


def trial(**changes):
    return TRIAL._replace(**changes)


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def database(tmp_path):
    trials = [trial(learned_tokens=100.0 + number, batch_size=3.0 + number % 2) for number in range(12)]
    return written(tmp_path / "s.db", moment([1], trials=[*trials, trial(batch_size=8, ended_at=NOW - 7200)]))


def test_the_gain_has_an_interval_by_batch_size(database):
    sentence, *lines = run("gain", "--db", str(database), "--since", "1h").splitlines()
    text = " ".join([sentence, *lines])
    assert text.startswith("Over the last 1h the learned arms made 1.4")
    assert "from 12 trials, which cost 6.0 s." in text
    assert lines[-1].split()[0] == "3-4"
    assert lines[-1].split()[-3:] == ["draft", "1", "learned"]
    assert all(len(line) <= 80 for line in (sentence, *lines))
    found = json.loads(run("gain", "--db", str(database), "--since", "1d", "--json"))
    assert found["num_trials"] == 13
    assert [row["batch_min"] for row in found["by_batch_size"]] == [3, 5]
    assert (
        found["by_batch_size"][0]["gain_low"]
        < found["by_batch_size"][0]["gain"]
        < found["by_batch_size"][0]["gain_high"]
    )
    assert found["by_batch_size"][1]["gain_low"] is None, "one trial alone"


def test_tables_show_what_was_measured_in_place_of_what_is_expected(tmp_path):
    database = write_database(tmp_path / "s.db")
    assert "vs plain" in run("tables", "--db", str(database))
    written(database, moment([], trials=[trial(), trial()]))
    shown = run("tables", "--db", str(database))
    assert "gain" in shown
    assert "1.36x" in shown
    assert "vs plain" not in shown


@pytest.mark.parametrize(
    ("held", "is_baseline_used", "used", "explained"),
    [
        (None, False, "learned", None),
        (None, True, "baseline", None),
        ([[1, 64, "draft 2"]], True, "held", "draft 2"),
        ([[1, 64, "draft 2"], [4, 4, None]], False, "held", "baseline"),
        ([[40, 64, "draft 2"]], False, "learned", None),
    ],
)
def test_tables_and_explain_show_what_is_held(tmp_path, held, is_baseline_used, used, explained):
    database = write_database(tmp_path / "s.db")
    holds = [] if held is None else [HoldsRow(1, json.dumps(held), NOW)]
    written(database, moment([], trials=[trial(batch_size=4, is_baseline_used=is_baseline_used)], holds=holds))
    shown, found = run("tables", "--db", str(database)), json.loads(run("tables", "--db", str(database), "--json"))
    assert [row["used"] for row in found if row["batch_min"] <= 4 <= row["batch_max"]] == [used]
    assert (used in shown) == (used != "learned")
    words = ("explain", "--batch", "4", "--db", str(database))
    assert json.loads(run(*words, "--json"))["held"] == explained
    assert ("Held here" in run(*words)) == bool(explained)


def test_without_trials_it_says_why(tmp_path):
    assert "No trial has ended" in run("gain", "--db", str(written(tmp_path / "s.db")))


def test_the_view_has_the_mean_by_hour_and_range(database):
    found = rows(database, "SELECT batch_bucket, num_trials, lost_s, gain FROM gain ORDER BY batch_min")
    assert found == [("3-4", 12, 6.0, pytest.approx(1.1)), ("5-8", 1, 0.5, pytest.approx(1.1))]


@pytest.mark.parametrize("text", ["24", "h", "-1h", "1w", ""])
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(UserError, match="write 30m, 24h or 7d"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one of --arm ARM, --baseline and --release"),
        (("--arm", "draft 2", "--release"), "give one of"),
        (("--arm", "draft x"), "draft x"),
        (("--arm", "plain", "--batch", "1,4"), "has a gap"),
        (("--arm", "plain", "--batch", "9-8"), "--batch"),
        (("--release", "--db", "/nonexistent/s.db"), "no controller serves"),
    ],
)
def test_a_hold_that_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        CliRunner().invoke(app, ["hold", *arguments], catch_exceptions=False)
