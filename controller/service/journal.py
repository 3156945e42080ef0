"""Commits: about once a second, one for each context that changed, with everything that belongs together.

A commit holds the raw reports learned from since the last one, the estimator's state that includes them, and the high-water
marks that say so. Rows and marks are taken on the event loop when the reports are learned from, so that after a crash none
of them is ahead of the others. Once the store says that a commit is on disk, its marks become durable_seq. Until then the
context's next changes are collected. Rows have the field names of the database's columns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import structlog

from speclen.controller.estimator import Estimator, Estimators
from speclen.controller.service.registry import Context, SeqWindow, Worker
from speclen.controller.wire.stored import row_of
from speclen.records import ContextKey, Decision, DriftEvent, Hold, Limits, Profile, StepRecord, Table, Trial, parse_arm
from speclen.store.database import Store
from speclen.store.schema import (
    AcceptanceRow,
    ArmEstimateRow,
    Commit,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    HoldsRow,
    PredictionRow,
    ProfileRow,
    StateRow,
    StoreEventRow,
    TrialRow,
    WorkerRow,
    filled,
)
from speclen.store.transaction import ReportsRefusedError

log = structlog.get_logger()

# Largest share of the event loop's time for building commits; with many contexts the interval grows instead.
MAX_SHARE = 0.1
# Reports that are not on disk yet, some 500 bytes each. Beyond this number, which is reached in two seconds at 100,000 a
# second, streams wait for a disk that works. If it does not, the oldest raw rows are dropped; the estimates keep them.
MAX_WAITING_REPORTS = 200_000
# Decisions and drift events kept while the disk is full. They are rare, so this is only a safety limit.
MAX_EVENTS = 10_000


def worker_of(row: WorkerRow, context: Context) -> Worker:
    """A worker as of its last commit: everything settled then is durable. Raises ValueError if its ranges are invalid."""
    seqs = SeqWindow(row.applied_seq, row.missing_ranges, row.num_missing, row.num_repeated)
    return Worker(
        worker_key=row.worker_key,
        worker_id=row.worker_id,
        epoch=row.epoch,
        context=context,
        limits=Limits(row.max_batch_size, row.max_speculation_length, row.ngram),
        address=row.address,
        policy=row.policy,
        registered_at=row.registered_at,
        last_seen_at=row.last_seen_at,
        seqs=seqs,
        durable_seq=seqs.settled_seq,
        num_reports=row.num_reports,
        num_refused=row.num_refused,
    )


def estimate_rows(estimator: Estimator, context: Context, in_use: Table, now: float) -> list[ArmEstimateRow]:
    """Rows of the learned table of a context. in_use: the arms in use, which holds and verdicts may have changed."""
    more = {"context_id": context.context_id, "updated_at": now}
    return [
        filled(
            ArmEstimateRow,
            each,
            each.arm,
            arm=str(each.arm),
            is_best=each.arm == in_use.arm_for(each.batch_min),
            **more,
        )
        for each in estimator.rows()
    ]


def acceptance_rows(estimator: Estimator, context: Context, now: float) -> list[AcceptanceRow]:
    survival = enumerate(estimator.survival(), start=1)
    return [AcceptanceRow(context.context_id, position, *each, now) for position, each in survival]


def decision_row(context: Context, decision: Decision, after_group_id: int, now: float) -> DecisionRow:
    previous = decision.previous_arm
    return filled(
        DecisionRow,
        decision,
        decision.arm,
        context_id=context.context_id,
        decision_version=decision.version,
        previous_speculation_length=None if previous is None else previous.speculation_length,
        previous_ngram=None if previous is None else previous.ngram,
        previous_arm=None if previous is None else str(previous),
        arm=str(decision.arm),
        after_group_id=after_group_id,
        decided_at=now,
    )


def trial_row(context: Context, trial: Trial, worker: Worker, after_group_id: int, now: float) -> TrialRow:
    return filled(
        TrialRow,
        trial,
        worker,
        context_id=context.context_id,
        learned_speculation_length=trial.learned.speculation_length,
        learned_ngram=trial.learned.ngram,
        baseline_speculation_length=trial.baseline.speculation_length,
        baseline_ngram=trial.baseline.ngram,
        after_group_id=after_group_id,
        ended_at=now,
    )


def holds_row(context: Context, holds: Sequence[Hold], now: float) -> HoldsRow:
    words = [[hold.batch_min, hold.batch_max, None if hold.arm is None else str(hold.arm)] for hold in holds]
    return HoldsRow(context.context_id, json.dumps(words), now)


def holds_of(row: HoldsRow) -> list[Hold]:
    """The holds in a row. Raises ValueError or TypeError if `holds_row` did not write the text."""
    return [Hold(low, high, None if arm is None else parse_arm(arm)) for low, high, arm in json.loads(row.holds)]


@dataclass(slots=True)
class PredictedTimes:
    """Sums over usable samples at the arm in use. Their ratio is the prediction error.

    num_tokens: per sequence, bonus included; predicted_s: for these tokens.
    """

    num_steps: int = 0
    num_tokens: float = 0.0
    observed_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, other: PredictedTimes) -> None:
        """Add the sums of further steps."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.observed_s += other.observed_s
        self.predicted_s += other.predicted_s


BatchRange: TypeAlias = tuple[int, int]  # the smallest and the largest batch size


@dataclass(slots=True)
class Unsaved:
    """Changes of one context since its last commit; workers by worker_id.

    marks: by worker_id, a worker, its epoch, and the seq up to which this commit has all of its reports. predictions: by
    the minute that begins at that second, and batch range.
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
    predictions: dict[tuple[int, BatchRange], PredictedTimes] = field(default_factory=dict)

    def add(self, newer: Unsaved) -> None:
        """Append the changes that followed these."""
        self.num_reports_dropped += newer.num_reports_dropped
        for name in ("reports", "decisions", "drift_events", "profiles", "limits"):
            getattr(self, name).extend(getattr(newer, name))
        for name in ("workers", "marks"):
            getattr(self, name).update(getattr(newer, name))
        for place, times in newer.predictions.items():
            self.predictions.setdefault(place, PredictedTimes()).add(times)


class Journal:
    """Collects changes on the event loop, passes them to the store, and moves high-water marks once they are on disk.

    given_up: by context, why its last commit failed, until a later one succeeds.
    """

    def __init__(
        self,
        store: Store,
        estimators: Estimators,
        clock: Callable[[], float],
        interval_s: float = 1.0,
        last_profile_id: int = 0,
    ) -> None:
        self.store = store
        self.estimators = estimators
        self.clock = clock
        self.interval_s = interval_s
        # The learner replaces it by one with holds and verdicts.
        self.in_use: Callable[[ContextKey], Table] = lambda key: estimators[key].table()
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
        """Mark the context's rows for the next commit. Returns its unsaved changes."""
        unsaved = self._unsaved.get(context.key)
        if unsaved is None:
            unsaved = self._unsaved[context.key] = Unsaved(self.clock(), context)
        return unsaved

    def note_worker(self, worker: Worker) -> None:
        """Keep the description and the high-water mark of a worker.

        A mark beyond reports that wait to be learned from would lose them, so the worker is then noted together with these.
        """
        if not worker.waiting:
            worker.noted_at = worker.last_seen_at
            unsaved = self.note_context(worker.context)
            unsaved.workers[worker.worker_id] = filled(WorkerRow, worker, worker.seqs, worker.limits, worker.context)
            unsaved.marks[worker.worker_id] = worker, worker.epoch, worker.seqs.settled_seq

    def note_reports(self, worker: Worker, steps: Sequence[StepRecord], group_id: int) -> None:
        """Keep reports that were learned from, with the mark: all reports up to the worker's applied_seq have been."""
        self.note_worker(worker)
        whose = group_id, worker.context.context_id, worker.worker_key, worker.epoch, worker.waiting_since
        self.note_context(worker.context).reports += [row_of(step, *whose) for step in steps]
        self._num_collected += len(steps)
        if self._num_collected > self.max_waiting_reports and self._is_stuck():
            self._drop_oldest()

    def note_predictions(self, context: Context, found: Mapping[BatchRange, PredictedTimes]) -> None:
        """Keep the comparison of predicted with observed times of steps that were learned from."""
        minute, predictions = int(self.clock() // 60) * 60, self.note_context(context).predictions
        for sizes, times in found.items():
            predictions.setdefault((minute, sizes), PredictedTimes()).add(times)

    def _is_stuck(self) -> bool:
        """True while commits fail, so that waiting would not make room."""
        return bool(self.given_up) or not self.store.health().ok

    def _drop_oldest(self) -> None:
        """Drop the oldest rows of the context with the most rows."""
        fullest = max(self._unsaved.values(), key=lambda unsaved: len(unsaved.reports))
        num = min(self._num_collected - self.max_waiting_reports, len(fullest.reports))
        del fullest.reports[:num]
        fullest.num_reports_dropped += num
        self._num_collected -= num
        self.num_reports_dropped += num

    def note_limits(self, context: Context, first_survival: Sequence[float], after_group_id: int) -> None:
        """Keep the limits of a context that was added or widened, and the first guess of its acceptance."""
        first = json.dumps(first_survival)
        row = ContextLimitsRow(context.context_id, *context.limits, first, after_group_id, self.clock())
        self.note_context(context).limits.append(row)

    def note_decision(self, context: Context, decision: Decision, after_group_id: int) -> None:
        """Keep a decision. Tables are kept for workers that are not isolated; a decision for an isolated one is an event."""
        unsaved = self.note_context(context)
        if not decision.isolated:
            unsaved.decisions.append(decision_row(context, decision, after_group_id, self.clock()))

    def note_drift(self, context: Context, event: DriftEvent, after_group_id: int) -> None:
        more = {"after_group_id": after_group_id, "detected_at": self.clock()}
        self.note_context(context).drift_events.append(filled(DriftEventRow, event, context, **more))

    def note_trial(self, context: Context, trial: Trial, worker: Worker, after_group_id: int) -> None:
        """Keep a finished trial."""
        row = trial_row(context, trial, worker, after_group_id, self.clock())
        self.note_context(context).trials.append(row)

    def note_holds(self, context: Context, holds: Sequence[Hold]) -> None:
        """Keep the holds of a context, in place of earlier ones."""
        self.note_context(context).holds[context.context_id] = holds_row(context, holds, self.clock())

    def note_profile(self, context: Context, profile: Profile, after_group_id: int) -> int:
        """Keep a profile, and return its id."""
        profile_id = next(self._profile_ids)
        self.note_context(context).profiles.append(
            ProfileRow(profile_id, context.context_id, profile, after_group_id, self.clock())
        )
        return profile_id

    def note_events(self, events: Sequence[StoreEventRow]) -> None:
        """Pass events of the store as a whole to the store at once."""
        if events:
            self.store.submit(Commit(store_events=events), lambda error: None)

    # Commits.

    async def run(self, settle: Callable[[], Awaitable[None]]) -> None:
        """Commit until cancelled; then call `finish`. settle: awaited before each commit, to learn from waiting reports."""
        while True:
            await settle()
            spent_s = 0.0
            for key in list(self._unsaved):
                started = time.perf_counter()
                self._launch(key)
                spent_s += time.perf_counter() - started
                await asyncio.sleep(0)  # so that answers are sent between two contexts
            await asyncio.sleep(max(self.interval_s, spent_s / MAX_SHARE))
            self._look_for_room()

    def commit(self) -> None:
        """Pass all changes to the store, except those of contexts whose last commit is not on disk yet."""
        for key in list(self._unsaved):
            self._launch(key)

    def _launch(self, key: ContextKey) -> None:
        """Pass a context's changes to the store, with the present state of its estimator."""
        if key in self._in_flight:
            return
        changes = self._in_flight[key] = self._unsaved.pop(key)
        try:
            commit = self._commit_of(changes)
        except Exception as error:  # a fault in one context must not prevent the others from being saved
            log.exception("what was learned of a context cannot be saved", context=str(key))
            self._land(key, error)
            return
        self.store.submit(commit, self._landing(key))

    def _landing(self, key: ContextKey) -> Callable[[Exception | None], None]:
        loop = asyncio.get_running_loop()

        def on_done(error: Exception | None) -> None:  # on the store's thread
            # If the loop has closed, nothing waits for the answer.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._land, key, error)

        return on_done

    def _commit_of(self, changes: Unsaved) -> Commit:
        now, context, estimator = self.clock(), changes.context, self.estimators[changes.context.key]
        return Commit(
            contexts=[
                filled(
                    ContextRow,
                    *(context, context.key, context.limits),
                    decision_version=estimator.table().version,
                    updated_at=now,
                )
            ],
            workers=list(changes.workers.values()),
            reports=changes.reports,
            acceptance=acceptance_rows(estimator, context, now),
            arm_estimates=estimate_rows(estimator, context, self.in_use(context.key), now),
            replaced_contexts=(context.context_id,),
            states=[StateRow(context.context_id, estimator.save(), now)],
            decisions=changes.decisions,
            drift_events=changes.drift_events,
            profiles=changes.profiles,
            context_limits=changes.limits,
            trials=changes.trials,
            holds=list(changes.holds.values()),
            predictions=[
                filled(PredictionRow, times, context, window_start=minute, batch_min=sizes[0], batch_max=sizes[1])
                for (minute, sizes), times in changes.predictions.items()
            ],
            num_reports_dropped=changes.num_reports_dropped,
        )

    def _land(self, key: ContextKey, error: Exception | None) -> None:
        """Handle the store's answer. The changes of a failed commit go into the next one.

        A report that the database refused counts in the estimates only. Its worker is told that it was refused, and drops
        it.
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
        """Let streams wait for a slow disk, but not for a broken one: then learning continues in memory."""
        if self._num_collected <= self.max_waiting_reports or self._is_stuck():
            self._room.set()
        else:
            self._room.clear()

    async def wait_for_room(self) -> None:
        """Wait while a working disk is too far behind."""
        if self._num_collected > self.max_waiting_reports:
            self._look_for_room()
            await self._room.wait()

    @property
    def num_waiting_reports(self) -> int:
        """Number of reports that were learned from and are not on disk."""
        return self._num_collected

    def lag_s(self) -> float:
        """Age of the oldest change that is not on disk; 0 if there is none."""
        waiting = [changes.since for changes in (*self._in_flight.values(), *self._unsaved.values())]
        return max(0.0, self.clock() - min(waiting)) if waiting else 0.0

    async def finish(self, timeout_s: float) -> bool:
        """Commit what is left, and wait for the disk. False if it did not answer in time. given_up has what it refused."""
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(2):  # the commits in flight, and the changes since
                    self.commit()
                    while self._in_flight:
                        self._landed.clear()
                        await self._landed.wait()
        except TimeoutError:
            return False
        return True
