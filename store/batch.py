"""Commits that wait for the disk, joined into one.

Reports, decisions and events add up; of other rows the newest per key counts. Beyond a bound the oldest raw reports are
dropped and counted; the estimates that contain them stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from speclen.store.records import Commit, ProfileRow
from speclen.store.statements import EVENTS, NEWEST

OnDone = Callable[[Exception | None], None]

# Decisions and drift events kept while the disk is full; they are rare, this only bounds a runaway.
MAX_WAITING_EVENTS = 10_000


class Batch:
    """Rows of one transaction for one scope, in the making. Not thread-safe.

    max_reports: raw rows held at most; num_reports_dropped: oldest ones given up so far.
    """

    def __init__(self, max_reports: int) -> None:
        self.max_reports = max_reports
        self.num_reports_dropped = 0
        self.callbacks: list[OnDone] = []
        self.reports: deque[Any] = deque()
        self.profiles: list[ProfileRow] = []
        self.replaced_contexts: set[int] = set()
        # By the field of a commit: the newest row of each key, and rows that add up.
        self.newest: dict[str, dict[Any, Any]] = {name: {} for name in NEWEST}
        self.events: dict[str, deque[Any]] = {name: deque(maxlen=MAX_WAITING_EVENTS) for name in EVENTS}

    @property
    def num_commits(self) -> int:
        """Commits absorbed: each has brought its callback."""
        return len(self.callbacks)

    def absorb(self, commit: Commit, *callbacks: OnDone) -> None:
        """Add what comes after everything absorbed so far."""
        self.callbacks.extend(callbacks)
        self._replace(commit.replaced_contexts)
        for name, insert in NEWEST.items():
            self.newest[name].update((insert.key_of(row), row) for row in getattr(commit, name))
        for name, waiting in self.events.items():
            waiting.extend(getattr(commit, name))
        self.profiles.extend(commit.profiles)
        self.reports.extend(commit.reports)
        self._drop_excess()

    def _replace(self, contexts: Sequence[int]) -> None:
        """Forget the arm estimates of contexts, here and in the database."""
        if contexts:
            self.replaced_contexts.update(contexts)
            kept = {key: row for key, row in self.newest["arm_estimates"].items() if key[0] not in contexts}
            self.newest["arm_estimates"] = kept

    def absorb_batch(self, newer: Batch) -> None:
        """Add a whole batch that comes after this one."""
        self.num_reports_dropped += newer.num_reports_dropped
        self.absorb(newer.as_commit(), *newer.callbacks)

    def as_commit(self) -> Commit:
        """Everything held, as one commit."""
        rows: dict[str, Any] = {name: list(each.values()) for name, each in self.newest.items()}
        rows |= {name: list(each) for name, each in self.events.items()}
        replaced = tuple(self.replaced_contexts)
        return Commit(reports=list(self.reports), profiles=self.profiles, replaced_contexts=replaced, **rows)

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
