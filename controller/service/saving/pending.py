"""Changes on their way to the disk: collected since a pair's last commit, then held until that is on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from speclen.controller.service.registry import Context, Worker
from speclen.store.records import ContextLimitsRow, DecisionRow, DriftEventRow, ProfileRow, WorkerRow

Pair = tuple[str, str]

# Decisions and drift events kept while the disk is full; they are rare, this only bounds a runaway.
MAX_EVENTS = 10_000


@dataclass(frozen=True, slots=True)
class Mark:
    """Progress of one incarnation of a worker in a commit: up to seq nothing is missing from it."""

    worker: Worker
    epoch: int
    seq: int

    def advance(self) -> None:
        """Let the worker's durable_seq follow a commit, unless another incarnation has registered meanwhile."""
        if self.worker.epoch == self.epoch:
            self.worker.durable_seq = max(self.worker.durable_seq, self.seq)


@dataclass(slots=True)
class Unsaved:
    """Changes of one pair of models since its last commit; contexts by context_id, workers and marks by worker_id."""

    since: float
    reports: list[tuple[object, ...]] = field(default_factory=list)
    num_reports_dropped: int = 0
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)
    decisions: deque[DecisionRow] = field(default_factory=partial(deque, maxlen=MAX_EVENTS))
    drift_events: deque[DriftEventRow] = field(default_factory=partial(deque, maxlen=MAX_EVENTS))
    profiles: list[ProfileRow] = field(default_factory=list)
    limits: list[ContextLimitsRow] = field(default_factory=list)

    def drop_oldest(self, num: int) -> int:
        """Give up raw rows, the oldest first; returns how many there were to give up."""
        num = min(num, len(self.reports))
        del self.reports[:num]
        self.num_reports_dropped += num
        return num
