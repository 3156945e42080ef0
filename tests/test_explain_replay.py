"""The law: stored reports give the stored decisions again, to the last bit, and a choice can be explained in numbers."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from control_fakes import CONTEXT, LIMITS, identity, registration, run, served
from store_rows import context
from typer.testing import CliRunner

from speclen.cli.explain import explain as explain_verb
from speclen.cli.replay import replay as replay_verb
from speclen.console.errors import UserError
from speclen.console.history import find_context
from speclen.controller.analysis.accuracy import spread
from speclen.controller.analysis.explain import Change, explain, in_words
from speclen.controller.analysis.replay import ContextAdded, GroupObserved, ProfileImported, cost_of, replay
from speclen.controller.estimator.estimator import Estimator
from speclen.store.connection import connect_reader, sqlite3
from speclen.store.records import StoredState
from speclen.v1 import control_pb2 as pb
from tests.steps_of import KEY, Steps, controller_for, profile_of, serve
from tests.steps_of import LIMITS as STEP_LIMITS


def history(seed: int = 1, rounds: int = 40, factor: float = 1.3):
    """Events of a controller that was seeded with a profile and then served, and what it decided on the way.

    factor: by which the profile has steps with draft tokens wrong.
    """
    steps, controller = Steps(seed), controller_for()
    profile = profile_of(steps, factor)
    events = [ContextAdded(KEY, STEP_LIMITS), ProfileImported(KEY, profile)]
    decisions = Estimator().add_context(KEY, STEP_LIMITS).decisions
    decisions += controller.seed_profile(KEY, profile).decisions
    for number in range(rounds):
        batch = (1, 4, 12, 30)[number // 3 % 4]
        group = [steps.step(batch, controller.length_for(KEY, batch)) for _ in range(6)]
        decisions += controller.observe(KEY, group, "w").decisions
        controller.take_probe(KEY, batch)  # probes leave no trace in decisions
        events.append(GroupObserved(number + 1, KEY, ["w"] * 6, group))
    return events, decisions


def test_a_replay_decides_as_before():
    events, decisions = history()
    assert len(decisions) > 6
    again = replay(events)
    assert [each.decision for each in again.decisions] == decisions
    assert (again.num_groups, again.num_reports) == (40, 240)


def test_a_replay_says_how_well_step_times_were_told():
    """A profile by which drafting takes 1.6 times as long: new cells are off by up to that, cells seen before by the noise.

    The machine's speed is nobody's error: of one that is half as fast in every other stretch times are told as well.
    """
    wrong, right = (replay(history(rounds=120, factor=factor)[0]).accuracy for factor in (1.6, 1.0))
    assert spread(right.first).median_percent < 5.0
    assert spread(wrong.first).p90_percent > 15.0
    assert spread(wrong.later).median_percent < 5.0
    assert spread([]) is None

    events, _ = history(rounds=120, factor=1.0)
    slower = [
        event
        if not isinstance(event, GroupObserved) or event.group_id // 20 % 2
        else replace(event, observations=[each._replace(latency_s=2.0 * each.latency_s) for each in event.observations])
        for event in events
    ]
    assert spread(replay(slower).accuracy.later).median_percent < 10.0


def test_another_policy_would_have_cost():
    """By true means plain decoding costs more than twice as much here; the estimate is within 10% of that ratio.

    It was never played, so what is known of its time is the profile's.
    """
    events, _ = history(rounds=120, factor=1.0)
    steps = Steps(1)
    adaptive, none, thompson = cost_of(events, ["adaptive", "none", "thompson"])
    assert adaptive.ratio == pytest.approx(1.0, abs=0.03)
    batches = (1, 4, 12, 30)
    played = {
        b: next(
            e.observations[-1].speculation_length
            for e in events[::-1]
            if getattr(e, "observations", None) and e.observations[0].batch_size == b
        )
        for b in batches
    }
    truth = sum(1 / steps.goodput(b, 0) for b in batches) / sum(1 / steps.goodput(b, played[b]) for b in batches)
    assert none.ratio == pytest.approx(truth, rel=0.1)
    assert thompson.ratio > 1.0
    assert none.policy_s == pytest.approx(none.actual_s * none.ratio)


def test_an_explanation_holds_the_numbers_of_the_choice():
    steps, controller = Steps(2), controller_for(Steps(2))
    serve(controller, steps, 6, 200)
    explanation = explain(controller, KEY, 6, Change(3, 5, "it was better", "yesterday"))
    assert explanation.speculation_length == controller.length_for(KEY, 6)
    assert len(explanation.rows) == 9
    assert explanation.survival[0] == pytest.approx(0.75, abs=0.05)
    best = min(explanation.rows, key=lambda row: row.estimate.ms_per_token).estimate
    assert explanation.chosen.estimate.ms_per_token <= 1.003 * best.ms_per_token
    assert explanation.runner_up != explanation.speculation_length
    words = " ".join(in_words(explanation))
    assert "A batch of 6 (bucket 6)" in words
    assert "from length 3 to length 5: it was better" in words
    assert f"length {explanation.runner_up}" in words.lower()


def test_what_cannot_be_explained_is_said():
    controller = controller_for()
    with pytest.raises(ValueError, match="nothing is known"):
        explain(controller, KEY, 4)
    with pytest.raises(ValueError, match="use 1 to 32"):
        explain(controller, KEY, 33)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """What a real controller wrote while a worker reported 240 steps and imported a profile on the way."""
    folder, steps = tmp_path_factory.mktemp("replay"), Steps(3)

    async def serve_some() -> None:
        async with served(folder, commit_interval_s=0.02) as server:
            narrow = pb.WorkerLimits(max_batch_size=4, max_speculation_length=3)
            await server.stub.RegisterWorker(registration(limits=narrow))
            for seq in range(1, 241):
                if seq == 120:
                    cells = [
                        pb.ProfileCell(batch_size=b, speculation_length=s, step_s=steps.time(b, s), num_steps=5)
                        for b in (1, 4, 16)
                        for s in range(LIMITS.max_speculation_length + 1)
                    ]
                    await server.stub.ImportProfile(
                        pb.ImportProfileRequest(
                            context=CONTEXT, cells=cells, survival=[0.8, 0.6], num_survival_rows=[99, 99]
                        )
                    )
                if seq == 60:  # the same worker, with room for more: the context is widened
                    await server.stub.RegisterWorker(registration())
                batch = (1, 3, 9)[seq // 10 % 3] if seq >= 60 else 1 + 2 * (seq // 10 % 2)
                seen = steps.step(batch, seq % 4)
                report = pb.StepReport(
                    seq=seq,
                    batch_size=batch,
                    speculation_length=seq % 4,
                    latency_s=seen.latency_s,
                    accepted_histogram=seen.accepted_histogram,
                    mean_context_length=100.0,
                    flags=[pb.STEP_FLAG_PREFILL] if seq % 17 == 0 else [],
                )
                await server.stub.ReportStep(pb.ReportStepRequest(worker=identity(), report=report))

    run(serve_some)
    return folder / "test.db"


def call(verb, *arguments: str):
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, list(arguments))


def test_stored_decisions_come_out_the_same(database):
    result = call(replay_verb, "--db", str(database), "--policies", "none", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout[result.stdout.index("{") :])
    assert document["num_reports"] == 240
    assert document["num_stored"] > 2
    connection = connect_reader(database)
    first, *_, widened = connection.execute("SELECT max_batch_size FROM context_limits").fetchall()
    assert (first[0], widened[0]) == (4, 32)
    reasons = [row[0] for row in connection.execute("SELECT reason FROM decisions ORDER BY decision_id")]
    connection.close()
    assert reasons[0].startswith("nothing is known yet"), "the first choice is on record"
    assert any("widened" in reason for reason in reasons)
    assert document["exact"], document["first_difference"]
    assert document["costs"][0]["policy"] == "none"
    assert document["accuracy"]["seen before"]["num"] > 20
    assert document["accuracy"]["new"]["num"] > 1
    assert set(document["changes"]) <= {"latency", "acceptance"}
    printed = call(replay_verb, "--db", str(database), "--policies", "").output
    assert "Step times relative to each other, as told beforehand: of cells seen before half within" in " ".join(
        printed.split()
    )


def test_a_stored_choice_is_explained(database):
    result = call(explain_verb, "--db", str(database), "--batch", "4", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["bucket"]["batch_min"] == 4
    assert len(document["rows"]) == 5
    assert document["last_change"]["when"].endswith("UTC")
    assert any("survive" in sentence for sentence in document["words"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batch", "99"], "batch size 99 is beyond"),
        (["--batch", "4", "--context", "elsewhere"], "no context is called 'elsewhere'"),
        (["--batch", "4", "--worker", "typo"], "no worker of context 1 is called 'typo'; known are w"),
    ],
)
def test_bad_questions_get_a_sentence(database, arguments, sentence):
    assert sentence in str(call(explain_verb, "--db", str(database), *arguments).exception)


def test_digits_alone_are_the_number_of_a_context_though_a_hash_holds_them():
    rows = [context(number, target="t#5904bc", device=f"gpu-{number}") for number in (1, 2)]
    stored = StoredState(contexts=tuple(rows))
    assert find_context(stored, "2") == rows[1]
    assert find_context(stored, "gpu-1") == rows[0]
    for text in ("9", "90"):
        with pytest.raises(UserError, match=f"no context is called '{text}'"):
            find_context(stored, text)


def damaged(database: Path, folder: Path, change: str) -> Path:
    """A copy in which a byte went wrong, as SQL that breaks the schema's rules."""
    copy = folder / "damaged.db"
    shutil.copyfile(database, copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        assert connection.execute(change).rowcount
    return copy


@pytest.mark.parametrize(
    ("verb", "change", "words"),
    [
        (
            replay_verb,
            "UPDATE step_reports SET accepted_histogram = '[1#2]' WHERE seq = 7",
            "the reports in the database",
        ),
        (replay_verb, "UPDATE step_reports SET copying = '{\"plan\"#1}' WHERE seq = 7", "the reports in the database"),
        (replay_verb, "UPDATE learned_states SET state = '{#' WHERE scope = 'context'", "what context 1 learned"),
        (explain_verb, "UPDATE learned_states SET state = '{#' WHERE scope = 'context'", "what context 1 learned"),
    ],
)
def test_a_damaged_row_is_one_sentence(database, tmp_path, verb, change, words):
    """It was a traceback of the JSON parser."""
    batch = ["--batch", "4"] if verb is explain_verb else []
    error = call(verb, "--db", str(damaged(database, tmp_path, change)), *batch).exception
    assert isinstance(error, UserError)
    assert words in str(error)
    assert "cannot be read" in str(error)


def test_what_part_of_the_reports_the_costs_are_of_is_said(database):
    """Steps that copied or did more than decode say nothing of how long a length takes: once they went without a word."""
    document = json.loads(call(replay_verb, "--db", str(database), "--policies", "none,fixed:1", "--json").stdout)
    for cost in document["costs"]:
        assert cost["num_reported_steps"] == 240
        assert cost["num_steps"] <= 240 - 240 // 17, "every 17th had a prompt in it"
        assert 0.0 < cost["actual_s"] < cost["reported_s"]
    cost = document["costs"][0]
    percents = 100 * cost["num_steps"] / 240, 100 * cost["actual_s"] / cost["reported_s"]
    printed = " ".join(call(replay_verb, "--db", str(database), "--policies", "none").output.split())
    assert (
        f"generated in {percents[0]:.3g}% of the reported steps ({percents[1]:.3g}% of their time; the others"
        in printed
    )


def test_a_replay_takes_the_newest_reports_and_says_so(database):
    """It took all that are kept, into memory: at the default limit of the database more than 10 GB."""
    arguments = ["--db", str(database), "--policies", "", "--newest"]
    document = json.loads(call(replay_verb, *arguments, "100", "--json").stdout)
    assert (document["num_reports"], document["num_left_out"], document["exact"]) == (100, 140, False)
    assert "The 140 oldest reports are left out" in call(replay_verb, *arguments, "100").output
    document = json.loads(call(replay_verb, *arguments, "240", "--json").stdout)
    assert (document["num_reports"], document["num_left_out"], document["exact"]) == (240, 0, True)
    assert "left out" not in call(replay_verb, *arguments, "240").output


def test_an_unknown_policy_is_refused(database):
    assert "policy 'best' is unknown" in str(call(replay_verb, "--db", str(database), "--policies", "best").exception)
