"""Commits: several times a second one per pair of models that changed, with all that belongs together.

A commit holds the raw reports learned from since the last one, the estimator's state that contains them and the
high-water marks that say so; rows and marks are taken when the reports are learned from, on the event loop, so that after
a crash none knows more than the others. When the store says that it is on disk, the marks become durable_seq.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from speclen.controller.estimator import Estimator
from speclen.controller.service.registry import Context, Worker
from speclen.controller.service.saving import rows
from speclen.controller.service.saving.pending import Flight, Mark, Pair, Unsaved
from speclen.controller.wire.stored import row_of
from speclen.records import Decision, DriftEvent, Profile, StepRecord
from speclen.store.database import Store
from speclen.store.records import Commit, StateRow, StoreEventRow

log = structlog.get_logger()

# Largest share of the event loop that building commits may take; with many contexts the interval grows instead.
MAX_SHARE = 0.1
# Reports on their way to a working disk before streams are made to wait: two seconds at 100,000 a second.
MAX_WAITING_REPORTS = 200_000


class Journal:
    """Collects on the event loop, hands over to the store, and moves high-water marks when the disk has answered.

    Without a store nothing is kept, and everything counts as saved at once. given_up: why, by pair, until a later commit of
    it lands.
    """

    def __init__(
        self,
        store: Store | None,
        estimator: Estimator,
        clock: Callable[[], float],
        interval_s: float = 1.0,
        last_profile_id: int = 0,
    ) -> None:
        self.store = store
        self.estimator = estimator
        self.clock = clock
        self.interval_s = interval_s
        self.max_waiting_reports = MAX_WAITING_REPORTS
        self.num_commits = 0
        self.num_failed_commits = 0
        self.given_up: dict[Pair, Exception] = {}
        self._profile_ids = itertools.count(last_profile_id + 1)
        self._unsaved: dict[Pair, Unsaved] = {}
        self._flights: dict[int, Flight] = {}
        self._flight_ids = itertools.count(1)
        self._num_collected = 0
        self._room = asyncio.Event()
        self._room.set()
        self._landed = asyncio.Event()

    # Changes.

    def _of(self, context: Context) -> Unsaved:
        unsaved = self._unsaved.get(context.key.pair)
        if unsaved is None:
            unsaved = self._unsaved[context.key.pair] = Unsaved(self.clock())
        unsaved.contexts[context.context_id] = context
        return unsaved

    def note_worker(self, worker: Worker) -> None:
        """Keep the worker's description and high-water mark.

        A mark beyond reports that wait to be learned from would lose them: then the worker is noted with these.
        """
        if not worker.waiting:
            worker.noted_at = worker.last_seen_at
            unsaved = self._of(worker.context)
            unsaved.workers[worker.worker_id] = rows.worker_row(worker)
            unsaved.marks[worker.worker_id] = Mark(worker, worker.epoch, worker.seqs.settled_seq)

    def note_reports(self, worker: Worker, steps: Sequence[StepRecord], group_id: int) -> None:
        """Keep reports that were learned from, with the mark: everything up to the worker's applied_seq has been."""
        self.note_worker(worker)
        if self.store is not None:
            whose = group_id, worker.context.context_id, worker.worker_key, worker.epoch, worker.waiting_since
            self._of(worker.context).reports += [row_of(step, *whose) for step in steps]
            self._num_collected += len(steps)

    def note_limits(self, context: Context, after_group_id: int) -> None:
        """The context was made or widened."""
        self._of(context).limits.append(rows.limits_row(context, after_group_id, self.clock()))

    def note_decision(self, context: Context, decision: Decision, after_group_id: int) -> None:
        """Keep a decision of workers that are alike: the tables are kept for these. An isolated worker is an event."""
        unsaved = self._of(context)
        if not decision.isolated:
            unsaved.decisions.append(rows.decision_row(context, decision, after_group_id, self.clock()))

    def note_drift(self, context: Context, event: DriftEvent, after_group_id: int) -> None:
        self._of(context).drift_events.append(rows.drift_row(context, event, after_group_id, self.clock()))

    def note_profile(self, context: Context, profile: Profile, after_group_id: int) -> int:
        """Returns the id under which the profile is kept."""
        profile_id = next(self._profile_ids)
        self._of(context).profiles.append(rows.profile_row(profile_id, context, profile, after_group_id, self.clock()))
        return profile_id

    def note_context(self, context: Context) -> None:
        """The rows of the context are to be written anew."""
        self._of(context)

    def note_events(self, events: Sequence[StoreEventRow]) -> None:
        """Events of the store as a whole; handed over at once."""
        if self.store is not None and events:
            self.store.submit(Commit(store_events=events, scope="store"), lambda error: None)

    # Commits.

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
            await asyncio.sleep(max(self.interval_s, spent_s / MAX_SHARE))
            self._look_for_room()

    def commit(self) -> None:
        """Hand everything unsaved to the store at once."""
        for pair in list(self._unsaved):
            self._launch(pair)

    def _launch(self, pair: Pair) -> None:
        """Hand what is unsaved of a pair to the store, with the state of this moment."""
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
        self._submit(commit, flight)

    def _submit(self, commit: Commit, flight: Flight) -> None:
        assert self.store is not None
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
        now, contexts, estimator = self.clock(), changes.contexts.values(), self.estimator
        return Commit(
            contexts=[rows.context_row(each, estimator.table(each.key).version, now) for each in contexts],
            workers=list(changes.workers.values()),
            reports=changes.reports,
            acceptance=rows.acceptance_rows(estimator, pair, now),
            arm_estimates=[row for each in contexts for row in rows.estimate_rows(estimator, each, now)],
            replaced_contexts=tuple(changes.contexts),
            states=[StateRow(*pair, estimator.save(pair), now)],
            decisions=changes.decisions,
            drift_events=changes.drift_events,
            profiles=changes.profiles,
            context_limits=changes.limits,
            scope=" + ".join(pair),
        )

    def _land(self, flight_id: int, error: Exception | None) -> None:
        """The store has answered."""
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
        for mark in flight.marks.values():
            mark.advance()

    def _try_again(self, flight: Flight, error: Exception) -> None:
        """The raw rows of a commit that was given up are lost; what was learned from them goes into the next."""
        self.num_failed_commits += 1
        self.given_up[flight.pair] = error
        log.error("a commit was given up, what was learned goes into the next", reason=str(error))
        for worker in flight.workers:
            self.note_worker(worker)

    # The disk's delay.

    def _look_for_room(self) -> None:
        """Streams wait for a slow disk, but not for a broken one: then learning goes on in memory."""
        disk_works = self.store is not None and self.store.health().ok
        if self._num_collected <= self.max_waiting_reports or not disk_works:
            self._room.set()
        else:
            self._room.clear()

    async def wait_for_room(self) -> None:
        """Return at once, except when a working disk is too far behind."""
        if self._num_collected > self.max_waiting_reports:
            self._look_for_room()
            await self._room.wait()

    @property
    def num_waiting_reports(self) -> int:
        """Reports learned from that are not on disk."""
        return self._num_collected

    def lag_s(self) -> float:
        """Age of the oldest change that is not on disk; 0 when all are."""
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
