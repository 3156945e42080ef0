"""Changes on their way to the disk: collected since a pair's last commit, and handed to the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from speclen.controller.service.registry import Context, Worker
from speclen.store.records import ContextLimitsRow, DecisionRow, DriftEventRow, ProfileRow, WorkerRow

Pair = tuple[str, str]


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
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)
    decisions: list[DecisionRow] = field(default_factory=list)
    drift_events: list[DriftEventRow] = field(default_factory=list)
    profiles: list[ProfileRow] = field(default_factory=list)
    limits: list[ContextLimitsRow] = field(default_factory=list)


@dataclass(slots=True)
class Flight:
    """A commit that the store has and that is not on disk yet.

    workers: of whom it holds rows. marks: by worker, which move when it lands; a later commit may have taken them over.
    """

    pair: Pair
    workers: tuple[Worker, ...]
    marks: dict[str, Mark]
    num_reports: int
    since: float
