"""Commits: about once a second one per context that changed, with all that belongs together.

A commit holds the raw reports learned from since the last one, the estimator's state that contains them and the
high-water marks that say so; rows and marks are taken when the reports are learned from, on the event loop, so that after
a crash none knows more than the others. When the store says that it is on disk, the marks become durable_seq. Until then
the context's next changes are collected.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from speclen.controller.estimator import Contexts
from speclen.controller.service.registry import Context, Worker
from speclen.controller.service.saving import rows
from speclen.controller.wire.stored import row_of
from speclen.records import ContextKey, Decision, DriftEvent, Hold, Profile, StepRecord, Table, Trial
from speclen.store.database import Store
from speclen.store.schema import (
    Commit,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    HoldsRow,
    ProfileRow,
    StateRow,
    StoreEventRow,
    TrialRow,
    WorkerRow,
    filled,
)
from speclen.store.transaction import ReportsRefusedError

log = structlog.get_logger()

# Largest share of the event loop that building commits may take; with many contexts the interval grows instead.
MAX_SHARE = 0.1
# Reports on their way to a disk, some 500 bytes each. Beyond, streams wait for one that works, two seconds at 100,000 a
# second; for one that does not the oldest raw rows are given up, and the estimates that contain them stay.
MAX_WAITING_REPORTS = 200_000
# Decisions and drift events kept while the disk is full; they are rare, this only bounds a runaway.
MAX_EVENTS = 10_000


@dataclass(slots=True)
class Unsaved:
    """Changes of one context since its last commit; workers by worker_id.

    marks: by worker_id a worker, its epoch, and the seq up to which nothing is missing from it in this commit.
    """

    since: float
    context: Context
    reports: list[tuple[object, ...]] = field(default_factory=list)
    num_reports_dropped: int = 0
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    marks: dict[str, tuple[Worker, int, int]] = field(default_factory=dict)
    decisions: deque[DecisionRow] = field(default_factory=partial(deque, maxlen=MAX_EVENTS))
    drift_events: deque[DriftEventRow] = field(default_factory=partial(deque, maxlen=MAX_EVENTS))
    profiles: list[ProfileRow] = field(default_factory=list)
    limits: list[ContextLimitsRow] = field(default_factory=list)
    trials: deque[TrialRow] = field(default_factory=partial(deque, maxlen=MAX_EVENTS))
    holds: dict[int, HoldsRow] = field(default_factory=dict)

    def add(self, newer: Unsaved) -> None:
        """Take over the changes that followed these."""
        self.num_reports_dropped += newer.num_reports_dropped
        for name in ("reports", "decisions", "drift_events", "profiles", "limits"):
            getattr(self, name).extend(getattr(newer, name))
        for name in ("workers", "marks"):
            getattr(self, name).update(getattr(newer, name))


class Journal:
    """Collects on the event loop, hands over to the store, and moves high-water marks when the disk has answered.

    given_up: why, by context, until a later commit of it lands.
    """

    def __init__(
        self,
        store: Store,
        estimator: Contexts,
        clock: Callable[[], float],
        interval_s: float = 1.0,
        last_profile_id: int = 0,
    ) -> None:
        self.store = store
        self.estimator = estimator
        self.clock = clock
        self.interval_s = interval_s
        self.in_use: Callable[[ContextKey], Table] = estimator.table  # the learner adds holds and verdicts
        self.max_waiting_reports = MAX_WAITING_REPORTS
        self.num_commits = 0
        self.num_failed_commits = 0
        self.num_reports_dropped = 0
        self.given_up: dict[ContextKey, Exception] = {}
        self._profile_ids = itertools.count(last_profile_id + 1)
        self._unsaved: dict[ContextKey, Unsaved] = {}
        self._in_flight: dict[ContextKey, Unsaved] = {}
        self._num_collected = 0
        self._room = asyncio.Event()
        self._room.set()
        self._landed = asyncio.Event()

    # Changes.

    def note_context(self, context: Context) -> Unsaved:
        """Have the context's rows written again; returns what is unsaved of it."""
        unsaved = self._unsaved.get(context.key)
        if unsaved is None:
            unsaved = self._unsaved[context.key] = Unsaved(self.clock(), context)
        return unsaved

    def note_worker(self, worker: Worker) -> None:
        """Keep the worker's description and high-water mark.

        A mark beyond reports that wait to be learned from would lose them: then the worker is noted with these.
        """
        if not worker.waiting:
            worker.noted_at = worker.last_seen_at
            unsaved = self.note_context(worker.context)
            unsaved.workers[worker.worker_id] = filled(WorkerRow, worker, worker.seqs, worker.limits, worker.context)
            unsaved.marks[worker.worker_id] = worker, worker.epoch, worker.seqs.settled_seq

    def note_reports(self, worker: Worker, steps: Sequence[StepRecord], group_id: int) -> None:
        """Keep reports that were learned from, with the mark: everything up to the worker's applied_seq has been."""
        self.note_worker(worker)
        whose = group_id, worker.context.context_id, worker.worker_key, worker.epoch, worker.waiting_since
        self.note_context(worker.context).reports += [row_of(step, *whose) for step in steps]
        self._num_collected += len(steps)
        if self._num_collected > self.max_waiting_reports and self._is_stuck():
            self._drop_oldest()

    def _is_stuck(self) -> bool:
        """True while commits fail, so that waiting would make no room."""
        return bool(self.given_up) or not self.store.health().ok

    def _drop_oldest(self) -> None:
        """Drop the oldest rows of the fullest context."""
        fullest = max(self._unsaved.values(), key=lambda unsaved: len(unsaved.reports))
        num = min(self._num_collected - self.max_waiting_reports, len(fullest.reports))
        del fullest.reports[:num]
        fullest.num_reports_dropped += num
        self._num_collected -= num
        self.num_reports_dropped += num

    def note_limits(self, context: Context, after_group_id: int) -> None:
        """The context was made or widened."""
        row = ContextLimitsRow(context.context_id, *context.limits, after_group_id, self.clock())
        self.note_context(context).limits.append(row)

    def note_decision(self, context: Context, decision: Decision, after_group_id: int) -> None:
        """Keep a decision of workers that are alike: the tables are kept for these. An isolated worker is an event."""
        unsaved = self.note_context(context)
        if not decision.isolated:
            unsaved.decisions.append(rows.decision_row(context, decision, after_group_id, self.clock()))

    def note_drift(self, context: Context, event: DriftEvent, after_group_id: int) -> None:
        more = {"after_group_id": after_group_id, "detected_at": self.clock()}
        self.note_context(context).drift_events.append(filled(DriftEventRow, event, context, **more))

    def note_trial(self, context: Context, trial: Trial, worker: Worker, after_group_id: int) -> None:
        """Keep a finished trial."""
        row = rows.trial_row(context, trial, worker, after_group_id, self.clock())
        self.note_context(context).trials.append(row)

    def note_holds(self, context: Context, holds: Sequence[Hold]) -> None:
        """Keep what is held, in place of what was before."""
        self.note_context(context).holds[context.context_id] = rows.holds_row(context, holds, self.clock())

    def note_profile(self, context: Context, profile: Profile, after_group_id: int) -> int:
        """Returns the id under which the profile is kept."""
        profile_id = next(self._profile_ids)
        self.note_context(context).profiles.append(
            ProfileRow(profile_id, context.context_id, profile, after_group_id, self.clock())
        )
        return profile_id

    def note_events(self, events: Sequence[StoreEventRow]) -> None:
        """Events of the store as a whole; handed over at once."""
        if events:
            self.store.submit(Commit(store_events=events), lambda error: None)

    # Commits.

    async def run(self, settle: Callable[[], Awaitable[None]]) -> None:
        """Commit for ever; cancel to stop, then `finish`. settle: awaited before each commit, to learn what waits."""
        while True:
            await settle()
            spent_s = 0.0
            for key in list(self._unsaved):
                started = time.perf_counter()
                self._launch(key)
                spent_s += time.perf_counter() - started
                await asyncio.sleep(0)  # answers go out between two contexts
            await asyncio.sleep(max(self.interval_s, spent_s / MAX_SHARE))
            self._look_for_room()

    def commit(self) -> None:
        """Hand everything unsaved to the store, but for contexts whose last commit is not on the disk yet."""
        for key in list(self._unsaved):
            self._launch(key)

    def _launch(self, key: ContextKey) -> None:
        """Hand what is unsaved of a context to the store, with the state of this moment."""
        if key in self._in_flight:
            return
        changes = self._in_flight[key] = self._unsaved.pop(key)
        try:
            commit = self._commit_of(changes)
        except Exception as error:  # a fault in one context must not keep the others from being saved
            log.exception("what was learned of a context cannot be saved", context=str(key))
            self._land(key, error)
            return
        self.store.submit(commit, self._landing(key))

    def _landing(self, key: ContextKey) -> Callable[[Exception | None], None]:
        loop = asyncio.get_running_loop()

        def on_done(error: Exception | None) -> None:  # on the store's thread
            # The loop may have closed: then no caller waits for the answer.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._land, key, error)

        return on_done

    def _commit_of(self, changes: Unsaved) -> Commit:
        now, context, estimator = self.clock(), changes.context, self.estimator
        return Commit(
            contexts=[
                filled(
                    ContextRow,
                    *(context, context.key, context.limits),
                    decision_version=estimator.table(context.key).version,
                    updated_at=now,
                )
            ],
            workers=list(changes.workers.values()),
            reports=changes.reports,
            acceptance=rows.acceptance_rows(estimator, context, now),
            arm_estimates=rows.estimate_rows(estimator, context, self.in_use(context.key), now),
            replaced_contexts=(context.context_id,),
            states=[StateRow(context.context_id, estimator.save(context.key), now)],
            decisions=changes.decisions,
            drift_events=changes.drift_events,
            profiles=changes.profiles,
            context_limits=changes.limits,
            trials=changes.trials,
            holds=list(changes.holds.values()),
            num_reports_dropped=changes.num_reports_dropped,
        )

    def _land(self, key: ContextKey, error: Exception | None) -> None:
        """The store has answered. All of a commit that was given up goes into the next.

        A report that the database refused is in the estimates alone; its worker gets that as a refusal, and forgets it.
        """
        changes = self._in_flight.pop(key)
        refused = error.seqs if isinstance(error, ReportsRefusedError) else {}
        failure = None if refused else error
        if failure is None:
            self._num_collected -= len(changes.reports)
            self.num_commits += 1
            self.given_up.pop(key, None)
        else:
            self.num_failed_commits += 1
            self.given_up[key] = failure
            log.error("a commit was given up, all of it goes into the next", reason=str(failure))
            changes.add(self._unsaved.pop(key, Unsaved(changes.since, changes.context)))
            self._unsaved[key] = changes
        for worker, epoch, seq in changes.marks.values():
            if worker.worker_key in refused:
                worker.note_refusals(len(refused[worker.worker_key]), str(error))
                self.note_worker(worker)
            if failure is None and worker.epoch == epoch:  # no other incarnation has registered meanwhile
                worker.durable_seq = max(worker.durable_seq, seq)
        self._landed.set()
        self._look_for_room()

    # The disk's delay.

    def _look_for_room(self) -> None:
        """Streams wait for a slow disk, but not for a broken one: then learning goes on in memory."""
        if self._num_collected <= self.max_waiting_reports or self._is_stuck():
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
        waiting = [changes.since for changes in (*self._in_flight.values(), *self._unsaved.values())]
        return max(0.0, self.clock() - min(waiting)) if waiting else 0.0

    async def finish(self, timeout_s: float) -> bool:
        """Commit what is left and wait for the disk; False if it did not answer in time. What it refused is in given_up."""
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(2):  # what is on its way, and what was noted since
                    self.commit()
                    while self._in_flight:
                        self._landed.clear()
                        await self._landed.wait()
        except TimeoutError:
            return False
        return True
