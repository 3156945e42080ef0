"""The law: what one worker reports, however often, decides about its own lengths and hardly about the others'."""

from __future__ import annotations

import pytest
from control_fakes import report

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import create_service
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import Registration, Worker
from speclen.store.records import StoredState
from tests.steps_of import KEY, LIMITS, Steps

ROUNDS, BATCHES, RATE = 60, (2, 6, 12, 24), 16


def send(service: LearningService, worker: Worker, steps: Steps, batch: int, count: int, lies: bool) -> float:
    """Steps of a worker that follows its table, reported; the share of goodput that these lengths lose."""
    length, reports = service.table(worker).length_for(batch), []
    for _ in range(count):
        seen = steps.step(batch, length)
        seq = worker.window.applied_seq + len(reports) + 1
        runs, taken = seen.accepted_histogram, seen.latency_s
        if lies:  # everything is accepted, and every other step takes no time
            runs, taken = (0,) * length + (batch,), (1e-6, taken)[seq % 2]
        fields = {"batch_size": batch, "speculation_length": length, "latency_s": taken, "accepted_histogram": runs}
        reports.append(report(seq, **fields))
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
