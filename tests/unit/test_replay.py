"""Stored reports give the stored decisions again, to the last bit, and the costs of other policies."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.cli.support.errors import UserError
from speclen.controller.analysis.replay import ContextAdded, GroupObserved, ProfileImported, cost_of, replay
from speclen.controller.estimator import Estimator
from speclen.controller.wire.stored import row_of
from speclen.records import Arm, ContextKey, Decision, Limits, Profile, ProfileCell, StepFlag, StepRecord
from speclen.store.connection import sqlite3
from speclen.store.database import Store
from speclen.store.records import Commit, ContextLimitsRow, ProfileCellRow, ProfileRow
from tests.support.store_rows import NOW, context, decision, rows, store_now, worker

KEY = ContextKey("t", "d", "cpu:test", "float32")
LIMITS, WIDER = Limits(16, 4), Limits(32, 4)


def step_s(batch_size: int, length: int) -> float:
    """Overhead, draft passes, and verification that grows with the batch."""
    return 0.010 + 0.001 * length + 0.0002 * batch_size * (length + 1)


def step(seq: int, batch_size: int, arm: Arm, dice: random.Random, flags: frozenset = frozenset()) -> StepRecord:
    length = arm.speculation_length
    histogram = [0] * (length + 1)
    for _ in range(batch_size):
        run = 0
        while run < length and dice.random() < 0.75:
            run += 1
        histogram[run] += 1
    latency_s = step_s(batch_size, length) * dice.lognormvariate(0.0, 0.03)
    return StepRecord(
        *(seq, batch_size, arm, latency_s, tuple(histogram), 100.0),
        flags=flags,
        num_drafted_sequences=batch_size if length else 0,
        num_verified_tokens=batch_size * (length + 1),
    )


def profile(factor: float = 1.3) -> Profile:
    """Of these steps, with drafting wrong by a factor."""
    cells = [
        ProfileCell(size, length, step_s(size, length) * (factor if length else 1.0), 1e-5, 20)
        for size in (1, 4, 16)
        for length in range(5)
    ]
    return Profile(tuple(cells), (0.75, 0.56, 0.42, 0.32), (400,) * 4)


def history(rounds: int = 40) -> tuple[list, list[tuple[int, Decision]]]:
    """Events of a controller whose context is widened half-way, and its decisions with the last group before each."""
    estimator, dice = Estimator(), random.Random(1)
    events = [ContextAdded(KEY, LIMITS), ProfileImported(KEY, profile())]
    made = [(0, each) for each in estimator.add_context(KEY, LIMITS) + estimator.seed_profile(KEY, profile())]
    for number in range(1, rounds + 1):
        if number == rounds // 2:
            events.append(ContextAdded(KEY, WIDER))
            made += [(number - 1, each) for each in estimator.add_context(KEY, WIDER)]
        size = (1, 4, 12)[number // 3 % 3]
        arm = estimator.table(KEY).arm_for(size) if number % 4 else Arm(number % 5)
        flags = frozenset({StepFlag.PREFILL}) if number % 9 == 0 else frozenset()
        group = [step(6 * number + n - 5, size, arm, dice, flags) for n in range(6)]
        made += [(number, each) for each in estimator.observe(KEY, group, "worker-1").decisions]
        estimator.take_probe(KEY, "worker-1", size, WIDER)  # leaves no trace in decisions
        events.append(GroupObserved(number, KEY, "worker-1", group))
    return events, made


def test_another_policy_would_have_cost():
    events, _ = history(rounds=120)
    result = replay(events)
    adaptive, none, longest = cost_of(events, result, ["adaptive", "none", "fixed:4"])
    assert none.num_steps == adaptive.num_steps > 500
    assert adaptive.ratio <= 1.01, "the table at the end, against what was tried on the way"
    assert none.ratio > adaptive.ratio
    assert longest.ratio >= adaptive.ratio
    usable = [each for event in events[2:] for each in getattr(event, "steps", ()) if not each.flags]
    assert none.actual_s == pytest.approx(sum(each.latency_s for each in usable))


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """The same as a controller writes it."""
    path = tmp_path_factory.mktemp("replay") / "s.db"
    events, made = history()
    reports, limits, last_group_id = [], [], 0
    for event in events:
        if isinstance(event, GroupObserved):
            last_group_id = event.group_id
            reports += [row_of(each, event.group_id, 1, 1, 7, NOW) for each in event.steps]
        elif isinstance(event, ContextAdded):
            limits.append(ContextLimitsRow(1, *event.limits, last_group_id, NOW))
    changes = [
        decision(
            *(each.version, each.arm.speculation_length),
            ngram=each.arm.ngram,
            batch_min=each.batch_min,
            batch_max=each.batch_max,
            ms_per_token=each.ms_per_token,
            after_group_id=group_id,
        )
        for group_id, each in made
        if not each.isolated
    ]
    cells = tuple(ProfileCellRow(*cell) for cell in profile().cells)
    imported = ProfileRow(1, 1, "", False, profile().survival, profile().num_survival_rows, 0, NOW + 1, cells)
    store = Store.open(path)
    first = Commit(contexts=[context()], workers=[worker(240)], context_limits=limits, profiles=[imported])
    assert store_now(store, first) is None
    assert store_now(store, Commit(reports=reports, decisions=changes)) is None
    assert store.health().num_rows_refused == 0
    store.close()
    return path


def ask(path, *arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["replay", "--db", str(path), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_stored_decisions_come_out_the_same(database):
    document = json.loads(ask(database, "--policies", "none,fixed:2", "--json"))
    assert document["exact"], document
    assert (document["num_reports"], document["num_left_out"]) == (240, 0)
    assert [each["policy"] for each in document["costs"]] == ["none", "fixed:2"]
    assert "stored decisions came out the same, to the last bit." in ask(database)


def test_a_replay_takes_the_newest_reports_and_says_so(database):
    document = json.loads(ask(database, "--policies", "", "--newest", "100", "--json"))
    assert (document["num_reports"], document["num_left_out"], document["exact"]) == (100, 140, False)
    assert "The 140 oldest reports are left out" in ask(database, "--policies", "", "--newest", "100")


def test_an_unknown_policy_is_refused(database):
    for arguments in (["--policies", "best"], ["--policy", "best"]):
        with pytest.raises(UserError, match="'best' is unknown"):
            CliRunner().invoke(app, ["replay", "--db", str(database), *arguments], catch_exceptions=False)


def test_a_damaged_row_is_one_sentence(database, tmp_path):
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(database.read_bytes())
    connection = sqlite3.connect(damaged, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("UPDATE step_reports SET accepted_histogram = '[1#2]' WHERE seq = 7")
    connection.close()
    with pytest.raises(UserError, match="the reports in the database cannot be read"):
        CliRunner().invoke(app, ["replay", "--db", str(damaged)], catch_exceptions=False)
    assert rows(damaged, "SELECT count(*) FROM step_reports") == [(240,)]
