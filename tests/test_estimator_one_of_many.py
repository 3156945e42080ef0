"""The law: no single worker decides for the others, whatever device it names, whatever it says its rows hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from control_fakes import report

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.contexts.workers import MOST_WORKERS
from speclen.controller.estimator.core import Limits
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.times.surprise import clipped, weight
from speclen.controller.service.assembly import create_service
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import Registration
from speclen.store.records import StoredState
from speclen.v1 import control_pb2 as pb
from tests.steps_of import KEY, LIMITS, Steps, controller_for

ELSEWHERE = replace(KEY, device="x")
# Drafts cost little here, so the best length is long, and whoever makes others believe that nothing is accepted does harm.
ACCEPTANCE, BATCH, RATE = 0.8, 8, 16


def steps_of_cheap_drafts(seed: int = 7) -> Steps:
    steps = Steps(seed, acceptance=ACCEPTANCE)
    steps.time = lambda batch, length: 0.01 * (1.0 + 0.1 * length)
    return steps


def service_of(num_here: int) -> LearningService:
    service = create_service(ControllerConfig(in_memory=True), None, StoredState(), News())
    for at in range(num_here):
        service.register(Registration(f"w{at}", 1, KEY, LIMITS, "", "adaptive"))
    return service


def step_loss(service: LearningService, steps: Steps, name: str, count: int) -> float:
    """Honest steps of a worker, reported; the share of goodput that its length loses."""
    worker = service.registry.workers[name]
    length, first = service.table(worker).length_for(BATCH), worker.window.applied_seq + 1
    reports = []
    for seq in range(first, first + count):
        seen = steps.step(BATCH, length)
        fields = {"batch_size": BATCH, "speculation_length": length, "accepted_histogram": seen.accepted_histogram}
        reports.append(report(seq, latency_s=seen.latency_s, **fields))
    assert not service.take(worker, reports)
    service.learn(worker)
    return 1.0 - steps.goodput(BATCH, length) / steps.goodput(BATCH, steps.best(BATCH))


def lie(service: LearningService, count: int, reviews: tuple[pb.OutputReview, ...] = ()) -> None:
    """Nothing is accepted, says a worker of another device, unless it has reviews to say so: then its steps are true."""
    worker, steps = service.registry.workers["liar"], steps_of_cheap_drafts(8)
    first = worker.window.applied_seq + 1
    reports = []
    for seq in range(first, first + count):
        seen = steps.step(BATCH, 4)
        runs = seen.accepted_histogram if reviews else (BATCH, 0, 0, 0, 0)
        fields = {"batch_size": BATCH, "speculation_length": 4, "accepted_histogram": runs, "latency_s": seen.latency_s}
        reports.append(report(seq, reviews=reviews, **fields))
    assert not service.take(worker, reports)
    service.learn(worker)


NOTHING_RIGHT = pb.OutputReview(
    request_class=1, **dict.fromkeys(("matches", "proposed", "copied", "drafted"), bytes(1024))
)


@pytest.mark.parametrize("num_here", [1, 3])
@pytest.mark.parametrize("reviews", [(), (NOTHING_RIGHT,)], ids=["steps", "reviews"])
def test_a_liar_that_names_another_device_costs_the_others_little(num_here, reviews):
    """It was compared with nobody there, so its accepted tokens and its reviews counted for all devices of the pair."""
    service, steps, lost = service_of(num_here), steps_of_cheap_drafts(), []
    service.register(Registration("liar", 1, ELSEWHERE, LIMITS, "", "adaptive"))
    for number in range(60):
        for at in range(num_here):
            loss = step_loss(service, steps, f"w{at}", 8)
            lost += [loss] if number else []  # nothing is known before
        for _ in range(4):
            lie(service, 1 if reviews else 2 * RATE, reviews)
    assert sum(lost) / len(lost) < 0.06
    assert lost[-1] < 0.03
    if not reviews and num_here > 1:
        assert service.estimator.models_of(ELSEWHERE, "liar")[1]
        assert not any(service.estimator.models_of(KEY, f"w{at}")[1] for at in range(num_here))


def test_112_calls_of_one_with_reviews_do_not_end_drafting_elsewhere():
    service, steps = service_of(3), steps_of_cheap_drafts()
    for _ in range(20):
        for at in range(3):
            step_loss(service, steps, f"w{at}", 8)
    service.register(Registration("liar", 1, ELSEWHERE, LIMITS, "", "adaptive"))
    for _ in range(112):
        lie(service, 1, (NOTHING_RIGHT,))
    assert max(step_loss(service, steps, f"w{at}", 8) for at in range(3)) < 0.03


def test_devices_whose_loads_differ_share_what_is_accepted():
    """The one at small batches and quick, the other at large ones: nobody is unlike, and each keeps its own say in times."""
    estimator, alone, steps = Estimator(), Estimator(), steps_of_cheap_drafts()
    for each in (estimator, alone):
        each.add_context(KEY, Limits(4, 8))
    estimator.add_context(ELSEWHERE, Limits(64, 8))
    for number in range(80):
        small = [steps.step(1 + at % 4, number % 9) for at in range(64)]
        alone.observe(KEY, small, "small")
        assert not estimator.observe(KEY, small, "small").drift_events
        assert not estimator.observe(ELSEWHERE, [steps.step(48, (number * 5) % 9)] * 2, "large").drift_events
    assert estimator.models_of(KEY, "small") == estimator.models_of(ELSEWHERE, "large") == (0, 0)
    learned, by_itself = (each.context(KEY).main.times for each in (estimator, alone))
    assert learned.evidence.tolist() == by_itself.evidence.tolist()
    assert learned.mean_log.tolist() == by_itself.mean_log.tolist()


def test_devices_that_have_gone_are_no_yardstick():
    """What a device accepted that nobody uses any more is not held against requests of today."""
    estimator, before, now = Estimator(), steps_of_cheap_drafts(), Steps(9, acceptance=0.4)
    for key in (KEY, ELSEWHERE):
        estimator.add_context(key, LIMITS)
    for _ in range(20):
        estimator.observe(ELSEWHERE, [before.step(BATCH, 4) for _ in range(8)], "gone")
    for _ in range(400):
        estimator.observe(KEY, [before.step(BATCH, 4)], "here")
    found = [
        event.factor
        for _ in range(60)
        for event in estimator.observe(KEY, [now.step(BATCH, 4) for _ in range(8)], "here").drift_events
    ]
    assert "worker" not in found


def test_more_workers_than_are_told_apart_come_in_one_call():
    """Story: 127 were known, every newcomer was told that there was room, and only the first got it; all was forgotten."""
    estimator, steps = Estimator(), Steps(3)
    estimator.add_context(KEY, LIMITS)
    for at in range(MOST_WORKERS - 1):
        estimator.observe(KEY, [steps.step(4, 3) for _ in range(8)], f"w{at}")
    evidence = estimator.context(KEY).main.times.evidence.sum()
    senders = [name for name in ("new-0", "new-1", "w1", "w2") for _ in range(8)]
    outcome = estimator.observe(KEY, [steps.step(4, 3) for _ in senders], senders)
    assert not outcome.drift_events
    assert estimator.context(KEY).main.times.evidence.sum() > 0.9 * evidence
    assert len(estimator.context(KEY).workers.peers) == MOST_WORKERS
    assert estimator.tells_apart(KEY, "new-0")
    assert not estimator.tells_apart(KEY, "new-1")


def in_context(estimator: Estimator, steps: Steps, worker: str, tokens: float, count: int = 32) -> None:
    estimator.observe(KEY, [steps.step(BATCH, at % 5, tokens) for at in range(count)], worker)


def test_requests_of_two_kinds_keep_their_evidence():
    """Half of the workers hold 30,000 tokens a row, half 300: with each call all evidence was forgotten."""
    steps, few = Steps(4), 0
    estimator = controller_for(steps)
    for number in range(40):
        for at in range(6):
            in_context(estimator, steps, f"w{at}", (300.0, 30_000.0)[at % 2])
            times = estimator.context(KEY).group_of(f"w{at}").times
            few += number > 10 and times.grid(times.evidence)[BATCH - 1, :5].min() < 0.5  # of this call alone
    assert few <= 3  # of 174 calls


@pytest.mark.parametrize("claimed", [(1.0, 1.0), (1e8, 1e8), (1.0, 1e8)])
@pytest.mark.parametrize("num_honest", [1, 3])
def test_what_one_worker_says_its_rows_hold_decides_nothing(claimed, num_honest):
    estimator, steps = Estimator(), Steps(4)
    estimator.add_context(KEY, LIMITS)
    times = estimator.context(KEY).main.times
    for number in range(60):
        for at in range(num_honest):
            in_context(estimator, steps, f"w{at}", 1000.0, 8)
        if number >= 20:
            for _ in range(4):
                in_context(estimator, steps, "liar", claimed[number // 5 % 2])
            assert times.grid(times.evidence)[BATCH - 1, :5].min() > 2.0
            assert times.usual_context[BATCH - 1] < 4_100.0
            assert times.context.max() < 4_100.0


@pytest.mark.parametrize("num_workers", [1, 4])
def test_when_contexts_become_others_that_is_followed(num_workers):
    """Everybody's rows hold thirty times as much: within a few hundred reports what was seen before is a prior alone."""
    estimator, steps = Estimator(), Steps(4)
    estimator.add_context(KEY, LIMITS)
    times = estimator.context(KEY).main.times
    for number in range(40):
        for at in range(num_workers):
            in_context(estimator, steps, f"w{at}", 300.0 if number < 20 else 9_000.0)
    assert times.usual_context[BATCH - 1] == pytest.approx(9_000.0, rel=0.05)
    seen = times.evidence > 0.0
    assert times.context[seen].min() > 4_500.0


def test_who_was_set_apart_still_is_with_larger_limits():
    """Story: a worker with larger limits came, and everybody who had been found to be unlike taught the others again."""
    estimator, steps = Estimator(), Steps(5)
    estimator.add_context(KEY, LIMITS)

    def rounds(count: int) -> None:
        for _ in range(count):
            for worker, factor, nothing in (
                ("a", 1.0, False),
                ("b", 1.0, False),
                ("slow", 4.0, False),
                ("liar", 1.0, True),
            ):
                group = [steps.step(BATCH, 1 + at % 4) for at in range(8)]
                group = [step._replace(latency_s=factor * step.latency_s) for step in group]
                if nothing:
                    group = [
                        step._replace(accepted_histogram=(BATCH, *[0] * step.speculation_length)) for step in group
                    ]
                estimator.observe(KEY, group, worker)

    rounds(60)
    before = {name: estimator.models_of(KEY, name) for name in ("a", "b", "slow", "liar")}
    assert before["slow"][0]
    assert before["liar"][1]
    decided = {name: estimator.length_for(KEY, BATCH, name) for name in before}
    outcome = estimator.add_context(KEY, Limits(64, 10))
    assert outcome.decisions
    assert {name: estimator.models_of(KEY, name) for name in before} == before
    assert estimator.num_apart(KEY) == 2
    again = Estimator()
    again.restore(KEY, estimator.limits(KEY), estimator.export_state(KEY), estimator.export_pair_state(KEY.pair))
    assert {name: again.models_of(KEY, name) for name in before} == before
    for name, length in decided.items():
        assert len(estimator.table(KEY, name).choices) == len(estimator.context(KEY).buckets)
        assert abs(estimator.length_for(KEY, BATCH, name) - length) <= 2
    assert estimator.length_for(KEY, BATCH, "liar") <= 1
    rounds(20)
    assert {name: estimator.models_of(KEY, name) for name in before} == before
    seconds = estimator.context(KEY).main.choice.step_s[BATCH - 1, 3]
    assert seconds == pytest.approx(steps.time(BATCH, 3), rel=0.1)


def test_a_report_far_from_most_of_its_call_counts_for_little():
    """Eight of twelve take 1 us, says their worker: the four that took what was believed were moved there at full weight."""
    raw, cell = np.array([-9.0] * 8 + [0.0] * 4), np.zeros(12, dtype=int)
    narrow, own = np.full(12, 0.08), np.full(12, 50.0)
    kept, left, _ = clipped(raw, narrow, narrow, cell, own)
    counts = weight(left, own, np.full(12, 12.0))
    assert kept[8:] == pytest.approx([-8.8] * 4)
    assert counts[8:].max() < 0.05
    assert counts[:8] == pytest.approx([1.0] * 8)
    kept, left, _ = clipped(np.zeros(1), narrow[:1], narrow[:1], cell[:1], own[:1])
    assert (kept[0], left[0]) == (0.0, 1.0)
