"""Carries what was learned to the store: several times a second one commit per pair of models that changed.

A commit holds the raw reports learned from since the last one, the estimator's state that contains them and the
high-water marks that say so; each of them is taken when the reports are learned from, on the event loop, so that after
a crash none knows more than the others. When the store says that it is on disk, the marks become durable_seq.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from speclen.controller.estimator.core import ObserveOutcome, Profile
from speclen.controller.service.news import News
from speclen.controller.service.registry import RegisteredContext, Worker
from speclen.controller.service.snapshots import Snapshots, profile_row, worker_row
from speclen.store.records import (
    Commit,
    ContextLimitsRow,
    DecisionRow,
    DriftEventRow,
    ProfileRow,
    StoreEventRow,
    StoreHealth,
    WorkerRow,
)

log = structlog.get_logger()

Pair = tuple[str, str]
OnDone = Callable[[Exception | None], None]


class CommitStore(Protocol):
    """The part of store.Store that is used here."""

    def submit(self, commit: Commit, on_done: OnDone) -> None: ...

    def health(self) -> StoreHealth: ...


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """How often and how much is written."""

    # Seconds between commits: a worker keeps so much longer what it has reported. Each writes the estimator's whole state.
    interval_s: float = 1.0
    # Largest share of the event loop that building commits may take; with many contexts the interval grows instead.
    max_share: float = 0.1
    # Reports on their way to a working disk before streams are made to wait: two seconds at 100,000 a second.
    max_waiting_reports: int = 200_000


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one life of a worker is contained in a commit: up to seq nothing is missing from it."""

    worker: Worker
    epoch: int
    seq: int


@dataclass(slots=True)
class Unsaved:
    """What happened to one pair of models since its last commit."""

    reports: list[tuple[object, ...]] = field(default_factory=list)
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    contexts: dict[int, RegisteredContext] = field(default_factory=dict)
    decisions: list[DecisionRow] = field(default_factory=list)
    drift_events: list[DriftEventRow] = field(default_factory=list)
    profiles: list[ProfileRow] = field(default_factory=list)
    limits: list[ContextLimitsRow] = field(default_factory=list)
    relearned: set[int] = field(default_factory=set)
    since: float = 0.0


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


class Journal:
    """Collects on the event loop, hands over to the store, and moves high-water marks when the disk has answered.

    news: gets the workers whose marks moved. Without a store nothing is kept, and everything counts as saved at once.
    """

    def __init__(
        self,
        store: CommitStore | None,
        snapshots: Snapshots,
        clock: Callable[[], float],
        news: News,
        settings: JournalSettings | None = None,
        last_profile_id: int = 0,
    ) -> None:
        self.store = store
        self.snapshots = snapshots
        self.clock = clock
        self.news = news
        self.settings = settings or JournalSettings()
        self.num_commits = 0
        self.num_failed_commits = 0
        self.given_up: dict[Pair, Exception] = {}  # why, by pair; until a later commit of it lands
        self._profile_ids = itertools.count(last_profile_id + 1)
        self._unsaved: dict[Pair, Unsaved] = {}
        self._flights: dict[int, Flight] = {}
        self._flight_ids = itertools.count(1)
        self._num_collected = 0
        self._room = asyncio.Event()
        self._room.set()
        self._landed = asyncio.Event()

    # What happened.

    def _of(self, context: RegisteredContext) -> Unsaved:
        unsaved = self._unsaved.get(context.key.pair)
        if unsaved is None:
            unsaved = self._unsaved[context.key.pair] = Unsaved(since=self.clock())
        unsaved.contexts[context.context_id] = context
        return unsaved

    def note_worker(self, worker: Worker) -> None:
        """The worker's description or high-water mark changed. Reports that wait to be learned from would be lost by a
        mark beyond them: their worker is noted when they are learned from."""
        if not worker.group.rows:
            self._mark(self._of(worker.context), worker)

    def note_reports(self, worker: Worker, rows: Sequence[tuple[object, ...]]) -> None:
        """Everything of the worker up to its applied_seq has been learned from."""
        unsaved = self._of(worker.context)
        self._mark(unsaved, worker)
        if self.store is not None:
            unsaved.reports += rows
            self._num_collected += len(rows)

    def _mark(self, unsaved: Unsaved, worker: Worker) -> None:
        worker.noted_at = worker.last_seen_at
        unsaved.workers[worker.worker_id] = worker_row(worker)
        unsaved.marks[worker.worker_id] = Mark(worker, worker.epoch, worker.window.settled_seq)

    def note_limits(self, context: RegisteredContext, after_group_id: int) -> None:
        """The context was made or widened."""
        limits = context.limits
        self._of(context).limits.append(
            ContextLimitsRow(
                *(context.context_id, limits.max_batch_size, limits.max_speculation_length),
                *(after_group_id, self.clock(), limits.max_copied_tokens),
            )
        )

    def note_relearned(self, context: RegisteredContext) -> None:
        """What is stored of the context's cells is of another time."""
        self._of(context).relearned.add(context.context_id)

    def note_events(self, events: Sequence[StoreEventRow]) -> None:
        """What concerns the store as a whole; handed over at once."""
        if self.store is not None and events:
            self.store.submit(Commit(store_events=events, scope="store"), lambda error: None)

    def note_outcome(self, context: RegisteredContext, outcome: ObserveOutcome, after_group_id: int) -> None:
        """Choices that changed and drift that was detected, which may concern other contexts of the same pair."""
        if outcome.decisions or outcome.drift_events:
            decisions, events = self.snapshots.event_rows(outcome, after_group_id, self.clock())
            unsaved = self._of(context)
            unsaved.decisions += decisions
            unsaved.drift_events += events

    def note_profile(self, context: RegisteredContext, profile: Profile, after_group_id: int) -> int:
        """Returns the id under which the profile is kept."""
        profile_id = next(self._profile_ids)
        row = profile_row(profile_id, context, profile, after_group_id, self.clock())
        self._of(context).profiles.append(row)
        return profile_id

    # What becomes of it.

    async def run(self, settle: Callable[[], Awaitable[None]]) -> None:
        """Commit for ever; cancel to stop, then `finish`. settle: awaited before each commit, to learn what waits."""
        while True:
            await settle()
            spent_s = 0.0
            for pair in list(self._unsaved):
                started = time.perf_counter()
                self._launch(pair)
                spent_s += time.perf_counter() - started
                await asyncio.sleep(0)  # answers go out between two pairs
            await asyncio.sleep(max(self.settings.interval_s, spent_s / self.settings.max_share))
            self._look_for_room()

    def commit(self) -> None:
        """Hand everything unsaved to the store at once."""
        for pair in list(self._unsaved):
            self._launch(pair)

    def _launch(self, pair: Pair) -> None:
        """Make a commit of what is unsaved of a pair and hand it to the store."""
        changes = self._unsaved.pop(pair)
        workers = tuple(mark.worker for mark in changes.marks.values())
        flight = Flight(pair, workers, changes.marks, len(changes.reports), changes.since)
        if self.store is None:
            self._acknowledge(flight)
            return
        try:
            commit = self._commit_of(pair, changes)
        except Exception as error:  # a mistake of ours about one pair is no reason not to save the others
            log.exception("what was learned of a pair cannot be saved", target=pair[0], draft=pair[1])
            self._num_collected -= flight.num_reports
            self._try_again(flight, error)
            return
        if not self.store.health().ok:
            self._take_over_marks(flight)
        flight_id = next(self._flight_ids)
        self._flights[flight_id] = flight
        loop = asyncio.get_running_loop()

        def on_done(error: Exception | None) -> None:  # on the store's thread
            # The loop may have closed: then nobody waits for the answer any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._land, flight_id, error)

        self.store.submit(commit, on_done)

    def _take_over_marks(self, flight: Flight) -> None:
        """Commits wait for the disk, and each holds what those before it do: its marks are enough, or they would add up."""
        for earlier in reversed(self._flights.values()):
            if earlier.pair == flight.pair:
                if not earlier.marks:
                    break  # taken over, as were those of all before it
                flight.marks = earlier.marks | flight.marks
                earlier.marks = {}

    def _commit_of(self, pair: Pair, changes: Unsaved) -> Commit:
        """What happened to a pair, with what is believed at this moment."""
        estimates = self.snapshots.of_pair(pair, changes.contexts.values(), self.clock())
        return Commit(
            contexts=estimates.contexts,
            workers=list(changes.workers.values()),
            reports=changes.reports,
            acceptance=estimates.acceptance,
            latency_cells=estimates.latency_cells,
            plan_estimates=estimates.plan_estimates,
            states=estimates.states,
            decisions=changes.decisions,
            drift_events=changes.drift_events,
            profiles=changes.profiles,
            context_limits=changes.limits,
            replaced_contexts=tuple({*changes.relearned, *estimates.replaced}),
            scope=" + ".join(pair),
        )

    def _land(self, flight_id: int, error: Exception | None) -> None:
        flight = self._flights.pop(flight_id)
        self._num_collected -= flight.num_reports
        if error is None:
            self.num_commits += 1
            self.given_up.pop(flight.pair, None)
            self._acknowledge(flight)
        else:
            self._try_again(flight, error)
        self._landed.set()
        self._look_for_room()

    def _acknowledge(self, flight: Flight) -> None:
        self.news.note([mark.worker.worker_id for mark in flight.marks.values() if advance(mark)])

    def _try_again(self, flight: Flight, error: Exception) -> None:
        """The raw rows of a commit that was given up are lost; what was learned from them goes into the next."""
        self.num_failed_commits += 1
        self.given_up[flight.pair] = error
        log.error("a commit was given up, what was learned goes into the next", reason=str(error))
        for worker in flight.workers:
            self.note_worker(worker)

    # How far behind the disk is.

    def _look_for_room(self) -> None:
        """Streams wait for a slow disk, but not for a broken one: then learning goes on in memory."""
        disk_works = self.store is not None and self.store.health().ok
        if self._num_collected <= self.settings.max_waiting_reports or not disk_works:
            self._room.set()
        else:
            self._room.clear()

    async def wait_for_room(self) -> None:
        """Return at once, except when a working disk is too far behind."""
        if self._num_collected > self.settings.max_waiting_reports:
            self._look_for_room()
            await self._room.wait()

    @property
    def num_waiting_reports(self) -> int:
        """Reports learned from that are not on disk."""
        return self._num_collected

    def lag_s(self) -> float:
        """Age of the oldest thing that is not on disk; 0 when all is."""
        waiting = [flight.since for flight in self._flights.values()]
        waiting += [unsaved.since for unsaved in self._unsaved.values()]
        return max(0.0, self.clock() - min(waiting)) if waiting else 0.0

    async def finish(self, timeout_s: float) -> bool:
        """Commit what is left and wait for the disk; False if it did not answer in time. What it refused is in given_up."""
        self.commit()
        try:
            async with asyncio.timeout(timeout_s):
                while self._flights:
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            return False
        return True


def advance(mark: Mark) -> bool:
    """Let the worker's durable_seq follow a commit; False if that changed nothing."""
    worker = mark.worker
    if worker.epoch != mark.epoch:
        return False  # another life has registered meanwhile
    before, worker.durable_seq = worker.durable_seq, max(worker.durable_seq, mark.seq)
    return worker.durable_seq != before
