"""The controller runs trials, uses the baseline where learned arms lose, holds what people ask for, and keeps all of it."""

from __future__ import annotations

import pytest

from speclen.controller.baseline.guard import Guard
from speclen.controller.service.journal import holds_of
from speclen.controller.service.registry import Registration
from speclen.controller.wire.messages import InvalidMessageError, read_baseline, read_hold
from speclen.records import Arm, Choice, Hold, Limits
from speclen.store import queries
from speclen.store.connection import connect_reader
from speclen.store.schema import HoldsRow
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import report
from tests.support.fake_estimator import FakeEstimator, FakeEstimators
from tests.support.service_parts import KEY, LIMITS, Parts
from tests.support.store_rows import moment, written

LEARNED, BASELINE = Arm(3), Arm(1)
SECONDS = {LEARNED: 0.03, BASELINE: 0.01}


class Steady(FakeEstimators):
    """Always believe in one arm."""

    def add(self, key, limits):
        if key not in self:
            self[key] = FakeEstimator(self, key, limits, LEARNED, follows=False)
        return super().add(key, limits)


BASE = (Choice(1, 32, BASELINE),)


def worker_of(parts, policy="adaptive", baseline=BASE):
    registration = Registration("w", 7, KEY, LIMITS, "host:1", policy, transition_steps=2, baseline=baseline)
    worker = parts.learner.register(registration)
    parts.send(worker, 1)
    return worker


def serve(parts, worker, num_steps):
    """Report steps of the arms that the controller asks for; returns those arms."""
    probe, left, arms = None, 0, []
    for first in range(worker.seqs.applied_seq + 1, worker.seqs.applied_seq + num_steps, 8):
        reports = []
        for seq in range(first, first + 8):
            arm = probe.arm if left else parts.learner.table_in_use(worker)[0].arm_for(4)
            runs = [4] + [0] * arm.speculation_length
            more = {"probe_id": probe.probe_id} if left else {}
            length = arm.speculation_length
            reports.append(
                report(seq, speculation_length=length, latency_s=SECONDS[arm], accepted_histogram=runs, **more)
            )
            arms.append(arm)
            left = max(left - 1, 0)
        assert parts.learner.take(worker, reports) == []
        parts.learner.learn(worker)
        if worker.probe is not None:
            probe, left, worker.probe = worker.probe, worker.probe.num_steps, None
    return arms


async def test_a_learned_arm_that_loses_gives_way_and_everything_is_kept(tmp_path):
    parts = Parts(estimators=Steady())
    worker = worker_of(parts)
    serve(parts, worker, 3000)
    assert parts.learner.table_in_use(worker)[0].arm_for(4) == BASELINE
    assert parts.learner.table_in_use(worker)[0].arm_for(16) == LEARNED
    parts.journal.commit()
    commit = parts.store.last
    (decision,) = commit.decisions
    assert (decision.previous_speculation_length, decision.speculation_length) == (3, 1)
    assert (decision.batch_min, decision.batch_max) == (3, 4)
    assert "the baseline is used" in decision.reason
    assert {row.is_best for row in commit.arm_estimates if row.speculation_length == 3} == {True}, "at batch size 1"
    # Another process continues with the verdict.
    stored = written(tmp_path / "s.db", moment([1], trials=commit.trials))
    with connect_reader(stored) as connection:
        trials = [row.trial for row in queries.trials(connection)]
    again = Parts(estimators=Steady())
    again.learner.guards.restore(KEY, trials, [])
    assert again.learner.table_in_use(worker_of(again))[0].arm_for(4) == BASELINE


def test_shadow_serves_the_baseline_and_a_worker_without_one_what_is_learned():
    for policy, baseline, served in (("shadow", BASE, BASELINE), ("adaptive", (), LEARNED)):
        parts = Parts(estimators=Steady())
        worker = worker_of(parts, policy, baseline)
        arms = serve(parts, worker, 1200)
        assert parts.learner.table_in_use(worker)[0].arm_for(4) == served
        tried = sum(arm != served for arm in arms)
        assert bool(tried) == bool(baseline)
        assert tried <= 0.06 * len(arms)


@pytest.mark.parametrize("fails", ["observe", "next_trial", "take"])
def test_a_failing_comparison_ends_and_serving_continues(monkeypatch, fails):
    parts = Parts(estimators=Steady())
    worker = worker_of(parts)
    parts.learner.hold(KEY, [Hold(8, 16, Arm(2))], release=False)
    monkeypatch.setattr(Guard, fails, lambda *_, **__: 1 / 0)
    assert set(serve(parts, worker, 600)[-300:]) == {LEARNED}
    assert parts.learner.table_in_use(worker)[0].arm_for(8) == Arm(2), "holds outlive it"
    assert parts.totals.num_reports == 601


async def test_holds_are_used_kept_and_released():
    parts = Parts(estimators=Steady())
    worker = worker_of(parts)
    parts.learner.hold(KEY, [Hold(8, 16, Arm(2)), Hold(1, 2, None)], release=False)
    table = parts.learner.table_in_use(worker)[0]
    assert [table.arm_for(size) for size in (1, 4, 8)] == [BASELINE, LEARNED, Arm(2)]
    parts.journal.commit()
    (row,) = parts.store.last.holds
    assert holds_of(row) == [Hold(8, 16, Arm(2)), Hold(1, 2, None)]
    parts.learner.hold(KEY, [], release=True)
    assert parts.learner.table_in_use(worker)[0].arm_for(8) == LEARNED
    with pytest.raises(ValueError, match="unknown"):
        holds_of(HoldsRow(1, '[[1, 2, "draft x"]]', 0.0))


def choices(*ranges):
    return [pb.Choice(batch_min=low, batch_max=high, speculation_length=length) for low, high, length in ranges]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (choices((2, 32, 1)), "after batch size 0"),
        (choices((1, 4, 1), (6, 32, 1)), "leave no gaps"),
        (choices((1, 32, 5)), "beyond the worker's limits"),
    ],
)
def test_a_baseline_that_cannot_run_is_refused(given, words):
    with pytest.raises(InvalidMessageError, match=words):
        read_baseline(given, LIMITS)


def test_a_hold_that_no_worker_can_run_is_refused():
    with pytest.raises(InvalidMessageError, match="can run `draft 9`"):
        read_hold(pb.Hold(batch_min=1, batch_max=4, speculation_length=9), Limits(32, 4))
    assert read_hold(pb.Hold(batch_min=1, batch_max=4, is_baseline=True), LIMITS) == Hold(1, 4, None)
