"""`speclen tables`, `explain`, `gain` and `hold`: what was learned in words for people, and as rows for programs."""

import json

import pytest
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.cli.explain import find_context
from speclen.cli.gain import seconds_of
from speclen.cli.support.output import UserError
from speclen.controller.analysis.explain import Change, Explanation, in_words, rows_at
from speclen.records import Arm, ArmEstimate
from speclen.store.schema import Commit, HoldsRow
from tests.support.database_rows import write_database
from tests.support.store_rows import NOW, TRIAL, context, decision, estimate, moment, rows, written


@pytest.fixture
def database(tmp_path):
    return write_database(tmp_path / "s.db")


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_range_has_a_line_under_the_name_of_its_context(database):
    title, heading, *lines = run("tables", "--db", str(database)).splitlines()
    assert title == "t + d on cpu:test, float32"
    assert heading.split() == ["batch", "arm", "ms/token", "95%", "interval", "vs", "plain", "steps", "age"]
    plain, (*drafted, age) = (line.split() for line in lines)
    assert plain == ["1-2", "plain", "10", "9", "to", "11", "1.00x", "7"]
    assert drafted == ["3-4", "draft", "2", "10", "9", "to", "11", "2.00x", "1,200"]
    assert age.removesuffix("m").isdigit()  # how long ago depends on when the fixture was written


def test_json_is_the_rows_of_the_view(database):
    expected = rows(database, "SELECT * FROM choices")
    assert len(expected) == 2
    found = [tuple(row.values()) for row in json.loads(run("tables", "--db", str(database), "--json"))]
    assert [row[:-4] for row in found] == expected
    assert [row[-4:] for row in found] == [(None, None, None, "learned")] * 2  # no trial has ended


def test_contexts_can_be_picked(database):
    written(database, Commit(contexts=[context(2, "gpu")], arm_estimates=[estimate(context_id=2, is_best=True)]))
    for text in ("gpu", "2"):
        assert run("tables", "--db", str(database), "--context", text).splitlines()[0] == "t + d on gpu, float32"
    with pytest.raises(UserError, match=r"'tpu'; known are 1: t \+ d on cpu:test, .*; 2: t \+ d on gpu"):
        CliRunner().invoke(app, ["tables", "--db", str(database), "--context", "tpu"], catch_exceptions=False)


def test_an_empty_database_says_what_to_do(tmp_path):
    written(tmp_path / "s.db")
    assert "start a worker" in run("tables", "--db", str(tmp_path / "s.db"))
    assert run("tables", "--db", str(tmp_path / "s.db"), "--json").strip() == "[]"


def test_contradictory_flags_and_missing_files_are_refused(database, tmp_path):
    for arguments, words in [
        (["--db", str(database), "--json", "--watch"], "exclude each other"),
        (["--db", str(tmp_path / "none.db")], "there is no database at"),
        (["--db", __file__], "is damaged"),
    ]:
        result = CliRunner().invoke(app, ["tables", *arguments])
        assert isinstance(result.exception, UserError)
        assert words in str(result.exception)


def row(arm: Arm, ms: float, is_best: bool = False, spread: float = 0.1, batch_max: int = 4) -> ArmEstimate:
    """An estimate at batch sizes 3 to batch_max whose steps yield two tokens."""
    interval = (ms * (1 - spread), ms * (1 + spread))
    return ArmEstimate(3, batch_max, arm, 2.0, 2e-3 * ms, ms, *interval, 50, 1.9e-3 * ms, "online", is_best)


PLAIN, DRAFT, NGRAM = Arm(), Arm(3), Arm(2, True)


def test_the_words_hold_the_choice_its_rival_and_plain_decoding():
    rows = [row(PLAIN, 20.0), row(DRAFT, 8.0, True), row(NGRAM, 8.2), row(Arm(4), 5.0, batch_max=3)]
    found, change = rows_at(4, rows), Change(None, DRAFT, "it was better", "yesterday")
    assert [each.arm for each in found] == [DRAFT, NGRAM, PLAIN]
    words = in_words(Explanation("somewhere", 4, found, (0.75, 0.5), change))
    assert words[0] == "A batch of 4 uses 'draft 3', like every batch size of 3 to 4."
    assert "2.00 tokens per sequence in 16 ms: 8 ms per token (95%: 7.2 to 8.8), from 50 usable samples" in words[1]
    assert "which took 15.2 ms on average" in words[1]
    assert words[2].startswith(
        "The runner-up, 'n-gram else draft 2', needs 8.2 ms per token: 2.5% worse; their intervals"
    )
    assert words[3] == "Plain decoding needs 20 ms per token: the choice is 2.50 times as fast."
    assert words[4] == "Draft tokens 1 to 2 and all before them are accepted in 75%, 50% of steps."
    assert words[5] == "The choice last changed (yesterday) from nothing to 'draft 3': it was better."


def test_a_stored_choice_is_explained(tmp_path):
    path = write_database(tmp_path / "s.db")
    previous = {"previous_speculation_length": 2, "previous_ngram": True}
    elsewhere = decision(3, 1, batch_min=1, batch_max=2)
    written(path, Commit(decisions=[decision(2, 2, **previous), elsewhere]))
    document = json.loads(run("explain", "--db", str(path), "--batch", "4", "--json"))
    assert (document["context"], document["batch_size"]) == ("t + d on cpu:test, float32", 4)
    assert (document["arm"], document["runner_up"], document["survival"]) == ("draft 2", "plain", [0.75])
    assert [(each["arm"], each["is_best"], each["ms_per_token"]) for each in document["rows"]] == [
        ("draft 2", True, 10.0),
        ("plain", False, 20.0),
    ]
    assert document["last_change"]["previous_arm"] == "n-gram else draft 2"
    assert document["last_change"]["decided_at"].endswith("UTC")
    shown = run("explain", "--db", str(path), "--batch", "4")
    assert "draft 2 *" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "99"], "no worker of this context runs batch size 99: use 1 to 32"),
        (["--batch", "9"], "nothing is known about batch size 9 yet"),
        (["--batch", "4", "--context", "elsewhere"], "no context is called 'elsewhere'"),
    ],
)
def test_bad_questions_get_a_sentence(tmp_path, arguments, words):
    path = write_database(tmp_path / "s.db")
    with pytest.raises(UserError, match=words):
        CliRunner().invoke(app, ["explain", "--db", str(path), *arguments], catch_exceptions=False)


def test_digits_alone_are_the_number_of_a_context():
    rows = tuple(context(number, "gpu", target=f"t#590{number}bc", updated_at=-number) for number in (1, 2))
    assert find_context(rows, "2") == rows[1]
    assert find_context(rows, "") == rows[0]  # which changed last
    assert find_context(rows, "#5901") == rows[0]
    for text in ("9", "90"):
        with pytest.raises(UserError, match=f"no context is called '{text}'"):
            find_context(rows, text)
    with pytest.raises(UserError, match="matches several contexts"):
        find_context(rows, "gpu")


# Gain and hold.


def trial(**changes):
    return TRIAL._replace(**changes)


@pytest.fixture
def tried(tmp_path):
    trials = [trial(learned_tokens=100.0 + number, batch_size=3.0 + number % 2) for number in range(12)]
    return written(tmp_path / "s.db", moment([1], trials=[*trials, trial(batch_size=8, ended_at=NOW - 7200)]))


def test_the_gain_has_an_interval_by_batch_size(tried):
    sentence, *lines = run("gain", "--db", str(tried), "--since", "1h").splitlines()
    text = " ".join([sentence, *lines])
    assert text.startswith("Over the last 1h the learned arms made 1.4")
    assert "from 12 trials, which cost 6.0 s." in text
    first, *_, last, number, used = lines[-1].split()
    assert (first, last, number, used) == ("3-4", "draft", "1", "learned")
    assert all(len(line) <= 80 for line in (sentence, *lines))
    found = json.loads(run("gain", "--db", str(tried), "--since", "1d", "--json"))
    assert found["num_trials"] == 13
    assert [row["batch_min"] for row in found["by_batch_size"]] == [3, 5]
    first = found["by_batch_size"][0]
    assert first["gain_low"] < first["gain"] < first["gain_high"]
    assert found["by_batch_size"][1]["gain_low"] is None, "one trial alone"


def test_tables_show_what_was_measured_in_place_of_what_is_expected(database):
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
def test_tables_and_explain_show_what_is_held(database, held, is_baseline_used, used, explained):
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


def test_the_view_has_the_mean_by_hour_and_range(tried):
    found = rows(tried, "SELECT batch_bucket, num_trials, lost_s, gain FROM gain ORDER BY batch_min")
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
