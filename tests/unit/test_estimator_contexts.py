"""Contexts of the estimator: kept, replayed, widened and reset; isolated workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speclen.cli.replay import compare
from speclen.controller.analysis.replay import ContextAdded, Event, GroupObserved, ProfileImported, replay
from speclen.controller.estimator import Estimator, Estimators, Outcome
from speclen.controller.service.journal import decision_row
from speclen.controller.service.registry import Context
from speclen.records import Arm, ContextKey, Decision, Limits, Profile, ProfileCell, StepRecord
from speclen.store.schema import ContextRow
from tests.support.simulated_worker import GROUP, KEY, LIMITS, SIZES, Worker, made, profile
from tests.support.world import World


def test_the_same_calls_give_the_same_decisions_also_with_save_and_restore_in_between() -> None:
    first = Worker(made())
    second = Worker(made())
    for number in range(24):
        assert first.serve(SIZES[number % 6], 16) == second.serve(SIZES[number % 6], 16)
        if number % 5 == 0:
            blob, second.estimator = second.estimator.save(), made()
            second.estimator.restore(blob)
            assert second.estimator.save() == blob
    assert first.estimator.rows() == second.estimator.rows()
    assert first.estimator.table() == second.estimator.table()


def test_a_replay_of_its_events_makes_the_same_decisions() -> None:
    """To the last bit, and without the probes. The profile is wrong, and the context is widened half-way."""
    estimators, events, made = Estimators(), list[Event](), list[tuple[int, Decision]]()

    def num_groups() -> int:
        return sum(isinstance(event, GroupObserved) for event in events)

    def note(event: Event, decisions: list[Decision]) -> None:
        events.append(event)
        made.extend((num_groups(), decision) for decision in decisions)

    def observe(records: Sequence[StepRecord], worker: str = "") -> Outcome:
        outcome = Estimator.observe(estimator, records, worker)
        note(GroupObserved(num_groups() + 1, KEY, worker, records), outcome.decisions)
        return outcome

    for limits in (Limits(8, 4), LIMITS):
        note(ContextAdded(num_groups(), KEY, limits, ()), estimators.add(KEY, limits))
        estimator = estimators[KEY]
        estimator.observe = observe  # type: ignore[method-assign]
        if len(events) == 1:
            imported = ProfileImported(0, KEY, profile(draft_s=0.015, sizes=(1, 4, 8), longest=4))
            note(imported, estimator.seed(imported.profile))
        worker = Worker(estimator)
        for number in range(20):
            worker.serve((1, 4, 8)[number % 3], 16)
    assert replay(events).decisions == made
    assert len(made) > 2


@pytest.mark.parametrize(("ms_per_token", "exact"), [(None, True), (3.0, False)])
def test_a_replay_leaves_out_the_verdicts_of_trials(ms_per_token: float | None, exact: bool) -> None:
    """A verdict has a previous arm and no estimates; the same row with estimates would be a decision that is missing."""
    result, context = replay([ContextAdded(0, KEY, LIMITS, ())]), Context(1, KEY, LIMITS, 0.0)
    rows = [decision_row(context, decision, after, 0.0) for after, decision in result.decisions]
    verdict = rows[0]._replace(
        decision_version=9, previous_speculation_length=3, previous_ngram=False, ms_per_token=ms_per_token
    )
    assert compare(result, [*rows, verdict], [ContextRow(1, *KEY, *LIMITS, 1, 0.0, 0.0)])["exact"] is exact


def test_a_profile_takes_nothing_from_what_workers_reported() -> None:
    estimator, num_workers = made(), 20
    for number in range(num_workers):
        Worker(estimator, f"worker-{number}").serve(4, GROUP)
    before = [row.num_steps for row in estimator.rows()]
    estimator.seed(profile())
    assert [row.num_steps for row in estimator.rows()] == before
    assert sum(before) == GROUP * num_workers


def test_a_widened_context_keeps_what_it_uses() -> None:
    worker = Worker(made(limits=Limits(8, 8)))
    for number in range(20):
        worker.serve((1, 2, 4, 8)[number % 4], 40)
    worker.estimator.widen(Limits(16, 8))
    assert max(map(worker.shortfall, (1, 2, 4, 8))) < 0.03
    assert worker.estimator.table().choices[-1].batch_max == 16
    worker.serve(8, 40)
    assert max(map(worker.shortfall, (1, 2, 4, 8))) < 0.03


def wrong_times(step: StepRecord) -> StepRecord:
    return step._replace(latency_s=step.latency_s * 4.0 / (1 + step.arm.speculation_length) ** 1.5)


def all_accepted(step: StepRecord) -> StepRecord:
    return step._replace(accepted_histogram=(0,) * step.arm.speculation_length + (step.batch_size,))


@pytest.mark.parametrize("fault", [wrong_times, all_accepted])
def test_a_faulty_worker_of_four_is_isolated_and_the_others_keep_their_choice(fault) -> None:
    estimator = made()
    workers = [Worker(estimator, f"worker-{at}", at, 0.6) for at in range(4)]

    workers[0].distort = fault
    for number in range(100):
        for at, worker in enumerate(workers):
            worker.serve((2, 4, 8, 12)[(number // 5 + at) % 4], GROUP)
    assert [estimator.is_isolated(worker.name) for worker in workers] == [True, False, False, False]
    assert estimator.num_isolated == 1
    assert max(workers[1].shortfall(size) for size in (2, 4, 8, 12)) < 0.03


def test_of_two_workers_that_disagree_one_is_isolated_and_both_find_their_arms() -> None:
    """A draft that is ten times slower on one of them. The other one keeps the shared table, which people see."""
    estimator = made()
    workers = [Worker(estimator, f"worker-{at}", at) for at in range(2)]
    workers[1].world = World(0.75, 0.02)
    for number in range(150):
        for worker in workers:
            worker.serve((2, 4, 8)[number // 5 % 3], GROUP)
    assert estimator.num_isolated == 1
    assert max(worker.shortfall(size) for worker in workers for size in (2, 4, 8)) < 0.03


def test_a_worker_with_smaller_limits_gets_no_probe_beyond_them() -> None:
    worker, found = Worker(made(limits=Limits(32, 8, True))), []
    for _ in range(100):
        worker.estimator.observe([worker.step(4, 2) for _ in range(GROUP)], worker.name)
        found.append(worker.estimator.probe(worker.name, 4, Limits(32, 3)))
    probes = [probe for probe in found if probe is not None]
    assert probes
    assert all(probe.arm.within(Limits(32, 3)) == probe.arm for probe in probes)
    assert len({probe.probe_id for probe in probes}) == len(probes)


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="state"):
        made().restore(b"nothing of ours")


def test_contexts_of_one_pair_may_have_other_limits():
    """A context with shorter lengths than another of its pair once raised from the shapes of what they shared."""
    estimators = Estimators()
    short, long = (ContextKey("target", "draft", device, "float32") for device in ("small", "large"))
    estimators.add(short, Limits(8, 2))
    estimators.add(long, Limits(16, 6, ngram=True))
    estimators[short].seed(Profile((ProfileCell(1, 0, 0.01), ProfileCell(4, 2, 0.02)), (0.7, 0.5), (50, 50)))
    for key, length in ((short, 2), (long, 6)):
        steps = [StepRecord(seq, 4, Arm(length), 0.02, (2, *[0] * (length - 1), 2)) for seq in range(1, 40)]
        estimators[key].observe(steps, "worker")
        assert max(row.arm.speculation_length for row in estimators[key].rows()) == length
        assert estimators[key].table().choices


def test_a_context_that_is_reset_forgets_what_it_learned_and_learns_again() -> None:
    estimators = Estimators()
    estimators.add(KEY, LIMITS)
    worker = Worker(estimators[KEY])
    worker.serve(4, 400)
    version = worker.estimator.table().version
    outcome = estimators.reset(KEY, "a test")
    worker.estimator = estimators[KEY]
    assert [(event.factor, event.context) for event in outcome.drift_events] == [("reset", KEY)]
    assert not any(row.num_steps for row in worker.estimator.rows())
    worker.serve(4, 400)
    assert worker.estimator.table().version > version
    assert worker.shortfall(4) < 0.03
