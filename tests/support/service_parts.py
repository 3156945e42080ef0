"""The controller's service without gRPC: a fake estimator, a store that commits when the test says so, and reports."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from speclen.controller.service.journal import Journal
from speclen.controller.service.learner import Learner, Totals
from speclen.controller.service.registry import Registration, Registry, Worker
from speclen.records import ContextKey, Limits
from speclen.store.schema import Commit, ReportRow, StoreHealth
from tests.support.control_fakes import report
from tests.support.fake_estimator import FakeEstimators

KEY, ELSEWHERE = ContextKey("t", "d", "cpu", "float32"), ContextKey("t", "d", "cuda", "float32")
LIMITS = Limits(32, 4)


class FakeStore:
    """Keeps commits and lets the test say when they are on disk."""

    def __init__(self) -> None:
        self.commits: list[tuple[Commit, Callable[[Exception | None], None]]] = []
        self.ok = True

    def submit(self, commit: Commit, on_done: Callable[[Exception | None], None]) -> None:
        self.commits.append((commit, on_done))

    def health(self) -> StoreHealth:
        return StoreHealth(self.ok, "", 0, 0.0, 0)

    async def land(self, number: int = 0, error: Exception | None = None) -> None:
        self.commits[number][1](error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def last(self) -> Commit:
        return self.commits[-1][0]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Parts:
    """Everything of one controller."""

    clock: Clock = field(default_factory=Clock)
    estimators: Any = field(default_factory=FakeEstimators)
    store: FakeStore = field(default_factory=FakeStore)
    totals: Totals = field(default_factory=Totals)
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        self.registry = Registry(self.clock, 100, 100)
        self.journal = Journal(self.store, self.estimators, self.clock)
        self.learner = Learner(self.estimators, self.registry, self.journal, self.totals)

    def worker(self, worker_id: str = "w", epoch: int = 7, key: ContextKey = KEY, policy: str = "adaptive") -> Worker:
        return self.learner.register(Registration(worker_id, epoch, key, self.limits, "host:1", policy))

    def send(self, worker: Worker, *seqs: int, learn: bool = True) -> None:
        """Reports arrive, and are learned from, or wait."""
        self.learner.take(worker, [report(seq) for seq in seqs])
        if learn:
            self.learner.learn(worker)


def seqs_of(commit: Commit) -> list[int]:
    return [ReportRow(*row).seq for row in commit.reports]
