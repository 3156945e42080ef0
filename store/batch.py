"""Commits that wait for the disk, joined into one.

Reports, decisions and events add up; of everything else only the newest row per key counts, so that waiting takes
memory for reports alone. When those exceed a bound, the oldest raw rows are given up and counted: the estimates that
contain them stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from speclen.store.records import (
    AcceptanceRow,
    Commit,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    LatencyCellRow,
    PlanEstimateRow,
    ProfileRow,
    StateRow,
    StoreEventRow,
    WorkerRow,
)

OnDone = Callable[[Exception | None], None]

# Decisions and drift events kept while the disk is full; they are rare, this only bounds a runaway.
MAX_WAITING_EVENTS = 10_000


class Batch:
    """What one transaction writes for one scope, in the making. Not thread-safe.

    max_reports: raw rows held at most; num_reports_dropped: oldest ones given up so far.
    """

    def __init__(self, max_reports: int) -> None:
        self.max_reports = max_reports
        self.num_reports_dropped = 0
        self.callbacks: list[OnDone] = []
        self.contexts: dict[int, ContextRow] = {}
        self.workers: dict[int, WorkerRow] = {}
        self.acceptance: dict[tuple[str, str, int, int], AcceptanceRow] = {}
        self.latency_cells: dict[tuple[int, int, int], LatencyCellRow] = {}
        self.plan_estimates: dict[tuple[int, int, int], PlanEstimateRow] = {}
        self.states: dict[tuple[str, str], StateRow] = {}
        self.replaced_contexts: set[int] = set()
        self.reports: deque[Any] = deque()
        self.decisions: deque[DecisionRow] = deque(maxlen=MAX_WAITING_EVENTS)
        self.drift_events: deque[DriftEventRow] = deque(maxlen=MAX_WAITING_EVENTS)
        self.profiles: list[ProfileRow] = []
        self.context_limits: deque[ContextLimitsRow] = deque(maxlen=MAX_WAITING_EVENTS)
        self.store_events: deque[StoreEventRow] = deque(maxlen=MAX_WAITING_EVENTS)

    @property
    def num_commits(self) -> int:
        """Commits absorbed: each has brought its callback."""
        return len(self.callbacks)

    def absorb(self, commit: Commit, *callbacks: OnDone) -> None:
        """Add what comes after everything absorbed so far."""
        self.callbacks.extend(callbacks)
        for context_id in commit.replaced_contexts:
            self.replaced_contexts.add(context_id)
            self.latency_cells = {key: row for key, row in self.latency_cells.items() if key[0] != context_id}
            self.plan_estimates = {key: row for key, row in self.plan_estimates.items() if key[0] != context_id}
        self.contexts.update((row.context_id, row) for row in commit.contexts)
        self.workers.update((row.worker_key, row) for row in commit.workers)
        self.acceptance.update(((row.target, row.draft, row.batch_min, row.position), row) for row in commit.acceptance)
        self.latency_cells.update(
            ((row.context_id, row.batch_min, row.speculation_length), row) for row in commit.latency_cells
        )
        self.plan_estimates.update(((row.context_id, row.batch_min, row.place), row) for row in commit.plan_estimates)
        self.states.update(((row.scope, row.key), row) for row in commit.states)
        self.decisions.extend(commit.decisions)
        self.drift_events.extend(commit.drift_events)
        self.profiles.extend(commit.profiles)
        self.context_limits.extend(commit.context_limits)
        self.store_events.extend(commit.store_events)
        self.reports.extend(commit.reports)
        self._drop_excess()

    def absorb_batch(self, newer: Batch) -> None:
        """Add a whole batch that comes after this one."""
        self.num_reports_dropped += newer.num_reports_dropped
        self.absorb(newer.as_commit(), *newer.callbacks)

    def as_commit(self) -> Commit:
        """Everything held, as one commit."""
        return Commit(
            contexts=list(self.contexts.values()),
            workers=list(self.workers.values()),
            reports=list(self.reports),
            acceptance=list(self.acceptance.values()),
            latency_cells=list(self.latency_cells.values()),
            plan_estimates=list(self.plan_estimates.values()),
            states=list(self.states.values()),
            decisions=list(self.decisions),
            drift_events=list(self.drift_events),
            profiles=self.profiles,
            replaced_contexts=tuple(self.replaced_contexts),
            context_limits=list(self.context_limits),
            store_events=list(self.store_events),
        )

    def _drop_excess(self) -> None:
        excess = len(self.reports) - self.max_reports
        if excess > 0:
            self.drop_oldest(excess)

    def drop_oldest(self, count: int) -> None:
        """Give up this many raw rows."""
        self.num_reports_dropped += count
        self.reports = deque(islice(self.reports, count, None))


class Batches:
    """The content of one transaction: a batch per scope, bounded together. Not thread-safe."""

    def __init__(self, max_reports: int) -> None:
        self.max_reports = max_reports
        self.by_scope: dict[str, Batch] = {}

    @property
    def num_commits(self) -> int:
        return sum(batch.num_commits for batch in self.by_scope.values())

    @property
    def num_reports(self) -> int:
        return sum(len(batch.reports) for batch in self.by_scope.values())

    @property
    def num_reports_dropped(self) -> int:
        return sum(batch.num_reports_dropped for batch in self.by_scope.values())

    def absorb(self, commit: Commit, on_done: OnDone) -> None:
        """Add what comes after everything absorbed so far."""
        self._of(commit.scope).absorb(commit, on_done)
        self._drop_excess()

    def absorb_all(self, newer: Batches) -> None:
        """Add what has gathered after this."""
        for scope, batch in newer.by_scope.items():
            self._of(scope).absorb_batch(batch)
        self._drop_excess()

    def _of(self, scope: str) -> Batch:
        batch = self.by_scope.get(scope)
        if batch is None:
            batch = self.by_scope[scope] = Batch(self.max_reports)
        return batch

    def _drop_excess(self) -> None:
        """The scope with the most rows gives up its oldest."""
        while (excess := self.num_reports - self.max_reports) > 0:
            largest = max(self.by_scope.values(), key=lambda batch: len(batch.reports))
            largest.drop_oldest(min(excess, len(largest.reports)))
