"""A worker's metrics, without a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speclen.records import PLAIN, Arm, Limits, StepRecord
from speclen.worker.observing.metrics import WorkerMetrics
from tests.support.control_parts import client


@dataclass
class Load:
    num_running: int = 2
    num_waiting: int = 1
    num_kv_tokens_used: int = 50
    num_kv_tokens_total: int = 200
    num_looked_up_tokens: int = 128
    num_reused_tokens: int = 96
    num_steps: int = 7
    num_generated_tokens: int = 11
    num_drafts: int = 3
    num_draft_tokens: int = 6
    num_ngram_tokens: int = 2
    num_accepted_tokens: int = 4
    num_accepted_by_position: tuple[int, ...] = (2, 2)


class FakeEngine:
    num_threads = 3

    def load(self) -> Load:
        return Load()


def worker_metrics(engine: Any = None) -> WorkerMetrics:
    """Metrics of a worker with this engine, or one of fixed counts."""
    control = client(limits=Limits(4, 2, ngram=True), first=Arm(2, ngram=True))
    control.report(StepRecord(0, 3, Arm(2), 0.01, (1, 0, 2), 10.0))
    control.report(StepRecord(0, 3, PLAIN, 0.01, (3,), 10.0))
    return WorkerMetrics(engine or FakeEngine(), control)
