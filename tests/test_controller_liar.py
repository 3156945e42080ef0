"""The law: what one worker reports, however often, decides about its own lengths and hardly about the others'."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from control_fakes import report

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import create_service
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import Registration, Worker
from speclen.store.records import StoredState
from speclen.v1 import control_pb2 as pb
from tests.steps_of import KEY, LIMITS, Steps

ROUNDS, BATCHES, RATE = 60, (2, 6, 12, 24), 16


def send(
    service: LearningService,
    worker: Worker,
    steps: Steps,
    batch: int,
    count: int,
    lies: bool,
    of_time: bool = True,
    reviews: Sequence[pb.OutputReview] = (),
    flags: Sequence[pb.StepFlag] = (),
) -> float:
    """Steps of a worker that follows its table, reported; the share of goodput that these lengths lose."""
    length, reports = service.table(worker).length_for(batch), []
    for _ in range(count):
        seen = steps.step(batch, length)
        seq = worker.window.applied_seq + len(reports) + 1
        runs, taken = seen.accepted_histogram, seen.latency_s
        if lies:  # everything is accepted, and every other step takes no time
            runs, taken = (0,) * length + (batch,), (1e-6 if of_time else taken, taken)[seq % 2]
        fields = {"batch_size": batch, "speculation_length": length, "latency_s": taken, "accepted_histogram": runs}
        reports.append(report(seq, reviews=reviews, flags=flags, **fields))
    assert not service.take(worker, reports)
    service.learn(worker)
    return 1.0 - steps.goodput(batch, length) / steps.goodput(batch, steps.best(batch))


CASES = [
    pytest.param(3, 20, 0.08, id="turns bad midway"),
    *(pytest.param(many, 0, 0.08, id=f"one of {many} from the start") for many in (2, 3, 4)),
]


@pytest.mark.parametrize(("num_workers", "start", "most"), CASES)
def test_a_liar_at_16_times_the_rate_costs_the_others_little(num_workers, start, most):
    service = create_service(ControllerConfig(in_memory=True), None, StoredState(), News())
    workers = [service.register(Registration(f"w{at}", 1, KEY, LIMITS, "", "adaptive")) for at in range(num_workers)]
    steps, lost = Steps(7), []
    for number in range(ROUNDS + start):
        for at, worker in enumerate(workers):
            lies = at == 0 and number >= start
            batch = BATCHES[(number // 5 + at) % len(BATCHES)]
            loss = send(service, worker, steps, batch, 8 * (RATE if lies else 1), lies)
            if at and number >= start:
                lost.append(loss)
    assert sum(lost) / len(lost) < most


@pytest.mark.parametrize("num_workers", [3, 4])
def test_one_whose_steps_never_tell_of_time_is_compared_by_what_is_accepted(num_workers):
    """As where every step feeds a prompt along: it was no suspect, and had full weight at any rate."""
    service = create_service(ControllerConfig(in_memory=True), None, StoredState(), News())
    workers = [service.register(Registration(f"w{at}", 1, KEY, LIMITS, "", "adaptive")) for at in range(num_workers)]
    steps, lost = Steps(7, acceptance=0.3), []
    for number in range(ROUNDS):
        for at, worker in enumerate(workers):
            batch = BATCHES[(number // 5 + at) % len(BATCHES)]
            flags = [pb.STEP_FLAG_PREFILL] if at == 0 else []
            loss = send(service, worker, steps, batch, 8 * (1 if at else RATE), at == 0, of_time=False, flags=flags)
            if at:
                lost.append(loss)
    assert [service.estimator.models_of(KEY, f"w{at}")[1] for at in range(num_workers)] == [1] + [0] * (num_workers - 1)
    assert sum(lost) / len(lost) < 0.08


@pytest.mark.parametrize(("period", "visit"), [(40, 2), (20, 1)])
def test_a_liar_that_is_alone_at_a_load_is_found_by_those_who_come_there(period, visit):
    """Story: what it alone had taught the model to expect, it met; so the others were found to be unlike it."""
    service = create_service(ControllerConfig(in_memory=True), None, StoredState(), News())
    workers = [service.register(Registration(f"w{at}", 1, KEY, LIMITS, "", "adaptive")) for at in range(4)]
    steps = Steps(7, acceptance=0.8)
    for number in range(160):
        send(service, workers[0], steps, 24, 8 * RATE, lies=True, of_time=False)
        for at, worker in enumerate(workers[1:]):
            send(service, worker, steps, 24 if (number + 5 * at) % period < visit else 2, 8, lies=False)
    assert [service.estimator.models_of(KEY, f"w{at}")[1] for at in range(4)] == [1, 0, 0, 0]


def reviews_of(steps: Steps, right: float | None = None) -> list[pb.OutputReview]:
    """Of an output whose drafts are right as often as the steps say, or made up ones in which all are, or none."""
    drafted = bytes((steps.rng.random(64) < steps.acceptance).astype(int).tolist())
    nothing = dict.fromkeys(("matches", "proposed", "copied"), bytes(64 if right is None else 1024))
    return [pb.OutputReview(request_class=1, drafted=drafted if right is None else bytes([right]) * 1024, **nothing)]


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("others", [True, False])
def test_one_who_makes_reviews_up_costs_the_others_little(num_workers, right, others):
    """Its steps are true, but its outputs are unlike the others'; where these send none, nobody's count.

    Where all is right that a draft of four proposes, that is no further from the truth here than workers may differ.
    """
    service = create_service(ControllerConfig(in_memory=True), None, StoredState(), News())
    workers = [service.register(Registration(f"w{at}", 1, KEY, LIMITS, "", "adaptive")) for at in range(num_workers)]
    steps, lost = Steps(7), []
    for number in range(ROUNDS):
        for at, worker in enumerate(workers):
            batch = BATCHES[(number // 5 + at) % len(BATCHES)]
            told = reviews_of(steps, right) if at == 0 else reviews_of(steps) if others else []
            loss = send(service, worker, steps, batch, 8, lies=False, reviews=told)
            if at:
                lost.append(loss)
    apart = [service.estimator.models_of(KEY, f"w{at}")[1] for at in range(num_workers)]
    assert apart == [int(others and not right)] + [0] * (num_workers - 1)
    num_counted = service.estimator.acceptance(KEY.pair).reviews.num_outputs
    assert num_counted > 20 if others else num_counted <= 1, "the first one was alone then"
    assert sum(lost) / len(lost) < 0.03
