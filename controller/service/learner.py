"""Learning: reports are checked and wait with their worker; all that wait go into one call of the estimator.

Decisions, probes and rows follow from that call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from speclen.controller.estimator import Estimators
from speclen.controller.service.guards import SHADOW, Guards, View, view_of
from speclen.controller.service.journal import BatchRange, Journal, PredictedTimes
from speclen.controller.service.registry import Context, Registration, Registry, Worker
from speclen.controller.wire.ingest import read_step
from speclen.controller.wire.messages import InvalidMessageError
from speclen.records import (
    ArmEstimate,
    Choice,
    ContextKey,
    Decision,
    DriftEvent,
    Hold,
    Limits,
    Profile,
    StepRecord,
    Table,
)
from speclen.v1 import control_pb2 as pb

log = structlog.get_logger()

# Share of time above which sample_every doubles, and below which it halves. Learning takes half a core at most, since it
# pauses for as long as it ran; the rest is for messages. Halving doubles the share, which must stay below the first limit.
BUSY_SHARE, IDLE_SHARE = 0.4, 0.15
# Seconds over which the share is measured. Within one second workers know of a change, and what they have sent is handled.
PERIOD_S = 3.0
MAX_SAMPLE_EVERY = 1024
# Seconds for which reports wait for others, since a call of the estimator costs little more for many than for one.
LEARN_INTERVAL_S = 0.2
# This many reports do not wait; no group is larger.
MANY_REPORTS = 512
# The same while a context has learned from fewer than MANY_REPORTS: after a cold start, choices must change within steps.
FEW_REPORTS = 8
# Seconds after which last_seen_at of a worker without reports is stored again.
QUIET_NOTE_S = 10.0
# Workers with another policy do not use the table, and would ignore a probe.
FOLLOWS_TABLE = ("", "adaptive", SHADOW)


class Sampling:
    """Adapts sample_every to the time that reports take. sample_every: 1, 2, 4, ...; sent to every worker."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.sample_every = 1
        self._clock = clock
        self._since = clock()
        self._spent_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of a block."""
        started = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - started

    def judge(self) -> None:
        """Choose sample_every again, once a period. Called about once a second."""
        elapsed = self._clock() - self._since
        if elapsed < PERIOD_S:
            return
        share, self._spent_s, self._since = self._spent_s / elapsed, 0.0, self._clock()
        if share > BUSY_SHARE:
            self.sample_every = min(2 * self.sample_every, MAX_SAMPLE_EVERY)
        elif share < IDLE_SHARE:
            self.sample_every = max(self.sample_every // 2, 1)


class PredictionError:
    """Measured step times of a context compared with those that the table predicted for the generated tokens.

    Errors are ratios of sums, as is the objective. times: by batch range, since the start. elsewhere_s: time of usable
    samples at other arms: probes, outdated tables, workers with a policy of their own. regret_s: the part of that time that
    the arm in use would have saved.
    """

    def __init__(self) -> None:
        self.times: dict[BatchRange, PredictedTimes] = {}
        self.elsewhere_s = 0.0
        self.regret_s = 0.0
        self._table: Table | None = None
        self._choices: list[Choice] = []  # by batch size

    def add(self, table: Table, steps: Sequence[StepRecord]) -> dict[BatchRange, PredictedTimes]:
        """Compare steps with the table that was valid before they were learned from. Returns their sums by batch range."""
        if table is not self._table:
            self._table, self._choices = table, _by_batch_size(table)
        found: dict[BatchRange, PredictedTimes] = {}
        for step in steps:
            choice = self._choices[min(step.batch_size, len(self._choices) - 1)]
            if step.flags or choice.ms_per_token is None:
                continue
            num_tokens = step.tokens_per_sequence
            predicted_s = 1e-3 * choice.ms_per_token * num_tokens
            if step.arm == choice.arm:
                times = found.setdefault((choice.batch_min, choice.batch_max), PredictedTimes())
                times.add(PredictedTimes(1, num_tokens, step.latency_s, predicted_s))
            else:
                self.elsewhere_s += step.latency_s
                self.regret_s += step.latency_s - predicted_s
        for sizes, times in found.items():
            self.times.setdefault(sizes, PredictedTimes()).add(times)
        return found


def _by_batch_size(table: Table) -> list[Choice]:
    """The choice at every batch size. Entry 0 is unused."""
    sizes = [choice for choice in table.choices for _ in range(choice.batch_min, choice.batch_max + 1)]
    return [table.choices[0], *sizes]


@dataclass(slots=True)
class Totals:
    """Counts since the start of the process.

    num_reports: reports learned from, in num_groups calls. refused: by reason. drift: by factor.
    """

    num_reports: int = 0
    num_groups: int = 0
    num_repeated: int = 0
    num_missing: int = 0
    num_decisions: int = 0
    num_probes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)


class Learner:
    """Takes reports, feeds them to the estimator, and answers from it. Runs on one thread and never waits.

    last_group_id: of the newest call of the estimator.
    """

    def __init__(
        self,
        estimators: Estimators,
        registry: Registry,
        journal: Journal,
        totals: Totals,
        last_group_id: int = 0,
    ) -> None:
        self.estimators = estimators
        self.registry = registry
        self.journal = journal
        self.totals = totals
        self.last_group_id = last_group_id
        self.sampling = Sampling()
        self.prediction: dict[ContextKey, PredictionError] = {}
        self.guards = Guards(journal)
        journal.in_use = self.in_use
        self._learned: dict[ContextKey, dict[str, Table]] = {}
        self._tables: dict[ContextKey, dict[View, Table]] = {}
        self._waiting: dict[str, Worker] = {}

    # Reports.

    def register(self, registration: Registration) -> Worker:
        """Register a worker. Raises the errors of Registry.register."""
        known = self.registry.workers.get(registration.worker_id)
        if known is not None:
            self.learn(known)  # of its last incarnation
        worker = self.registry.register(registration)
        self.prepare(worker.context)
        self.journal.note_worker(worker)
        return worker

    def take(self, worker: Worker, reports: Sequence[pb.StepReport]) -> list[InvalidMessageError]:
        """Queue reports that are new and valid, and learn from them if it is time. Returns why others were refused."""
        now = worker.last_seen_at = self.journal.clock()
        if worker.seqs.close_gaps(now) or now - worker.noted_at > QUIET_NOTE_S:
            self.journal.note_worker(worker)
        if not reports:
            return []
        if not worker.waiting:
            worker.waiting_since = now
        refusals: list[InvalidMessageError] = []
        for report in self._new(worker, reports):
            try:
                worker.waiting.append(read_step(report, worker.limits))
            except InvalidMessageError as error:
                refusals.append(error)
        if refusals:
            worker.note_refusals(len(refusals), str(refusals[-1]))
        self.totals.refused.update(error.reason for error in refusals)
        if not worker.waiting:
            self.journal.note_worker(worker)  # counts changed
            return refusals
        self._waiting[worker.worker_id] = worker
        if len(worker.waiting) >= (MANY_REPORTS if worker.context.num_learned >= MANY_REPORTS else FEW_REPORTS):
            self.learn(worker)
        return refusals

    def _new(self, worker: Worker, reports: Sequence[pb.StepReport]) -> list[pb.StepReport]:
        """The reports that have not been seen before."""
        seqs = worker.seqs
        missing, repeated = seqs.num_missing, seqs.num_repeated
        new = [report for report in reports if seqs.admit(report.seq)]
        self.totals.num_missing += seqs.num_missing - missing
        self.totals.num_repeated += seqs.num_repeated - repeated
        return new

    async def run(self) -> None:
        """Learn a few times a second until cancelled."""
        while True:
            await asyncio.sleep(LEARN_INTERVAL_S)
            await self.learn_all()

    async def learn_all(self) -> None:
        """Learn from all waiting reports. Between workers, pause for as long as each took, so that messages are handled."""
        for worker in list(self._waiting.values()):
            started = time.perf_counter()
            with self.sampling.measured():
                self.learn(worker)
            await asyncio.sleep(time.perf_counter() - started)

    def learn(self, worker: Worker) -> None:
        """Learn from all waiting reports of a worker in one call of the estimator."""
        self._waiting.pop(worker.worker_id, None)
        steps, worker.waiting = worker.waiting, []
        if not steps:
            return
        context = worker.context
        worker.last_batch_size, worker.last_step_s = steps[-1].batch_size, steps[-1].latency_s
        try:
            prediction = self.prediction.setdefault(context.key, PredictionError())
            predicted = prediction.add(self.table_in_use(worker)[0], steps)
            outcome = self.estimators[context.key].observe(steps, worker.worker_id)
        except Exception as error:  # if it were raised, every report sent again would repeat the crash
            log.exception("the estimator failed, a group is not learned from", worker=worker.worker_id)
            self.totals.refused["estimator"] += len(steps)
            worker.note_refusals(len(steps), f"the estimator failed ({error})")
            self.journal.note_worker(worker)
            self._reset(context)  # its state may be damaged
            return
        self.last_group_id += 1
        context.num_learned += len(steps)
        worker.num_reports += len(steps)
        self.totals.num_groups += 1
        self.totals.num_reports += len(steps)
        self.journal.note_reports(worker, steps, self.last_group_id)
        self.journal.note_predictions(context, predicted)
        self._note(outcome.decisions, outcome.drift_events)
        if worker.policy in FOLLOWS_TABLE:
            self._note(self.guards.observe(worker, steps, self._learned_table(worker), self.last_group_id), ())
            self._take_probe(worker)

    def _reset(self, context: Context) -> None:
        try:
            outcome = self.estimators.reset(context.key, "the estimator failed")
        except Exception:
            log.exception("a context cannot be reset", context=str(context.key))
            return
        self._note(outcome.decisions, outcome.drift_events)

    def _note(self, decisions: Sequence[Decision], drift_events: Sequence[DriftEvent]) -> None:
        """Count, keep and apply the changes."""
        self.totals.num_decisions += len(decisions)
        for decision in decisions:
            self._forget_tables(decision.context)
            self.journal.note_decision(self.registry.contexts[decision.context], decision, self.last_group_id)
        for event in drift_events:
            self._forget_tables(event.context)
            self.totals.drift[event.factor] += 1
            if event.factor == "reset":
                log.error("a context starts from scratch", context=str(event.context), reason=event.detail)
            self.journal.note_drift(self.registry.contexts[event.context], event, self.last_group_id)

    def _take_probe(self, worker: Worker) -> None:
        """Ask for a trial or a probe for the worker's next steps; mostly there is none.

        A probe that no longer fits the worker's batch size is replaced, since it might never run.
        """
        waiting = worker.probe
        fits = waiting is not None and waiting.batch_min <= worker.last_batch_size <= waiting.batch_max
        if fits:
            return
        worker.probe = self.guards.next_trial(worker, self._learned_table(worker))
        if worker.probe is not None:
            return
        try:
            worker.probe = self.estimators[worker.context.key].probe(
                worker.worker_id, worker.last_batch_size, worker.limits, worker.probe_steps
            )
        except Exception:
            log.exception("the estimator failed to give a probe", context=str(worker.context.key))
            self._reset(worker.context)
        self.totals.num_probes += worker.probe is not None

    # Estimators.

    def prepare(self, context: Context) -> None:
        """Add a context to the estimator, or widen it."""
        key = context.key
        before = self.estimators[key].limits if key in self.estimators else None
        decisions = self.estimators.add(key, context.limits)
        estimator = self.estimators[key]
        if estimator.limits != before:
            self.journal.note_limits(context, estimator.first_survival, self.last_group_id)
            self._forget_tables(key)
        self._note(decisions, ())

    def import_profile(self, key: ContextKey, profile: Profile) -> int:
        """Seed a context, known or new. Returns the profile's id. Raises FullError."""
        lengths = len(profile.survival), *(cell.speculation_length for cell in profile.cells)
        context = self.registry.context(key, Limits(max(cell.batch_size for cell in profile.cells), max(lengths)))
        self.prepare(context)
        profile_id = self.journal.note_profile(context, profile, self.last_group_id)
        self._note(self.estimators[key].seed(profile), ())
        self._forget_tables(key)
        return profile_id

    # Answers.

    def table_in_use(self, worker: Worker) -> tuple[Table, View]:
        """The table in use for a worker, and what else it depends on.

        Arms are always up to date; expected times are as old as `refresh` allows.
        """
        view = view_of(worker, self._own(worker))
        tables = self._tables.setdefault(worker.context.key, {})
        table = tables.get(view)
        if table is None:
            table = tables[view] = self.guards.table(worker.context.key, self._learned_table(worker), view)
        return table, view

    def _own(self, worker: Worker) -> str:
        """The worker's id if it is isolated, else ""."""
        return worker.worker_id if self.estimators[worker.context.key].is_isolated(worker.worker_id) else ""

    def _learned_table(self, worker: Worker) -> Table:
        """The learned arms for a worker, even if they are not in use."""
        own, tables = self._own(worker), self._learned.setdefault(worker.context.key, {})
        if own not in tables:
            tables[own] = self.estimators[worker.context.key].table(own)
        return tables[own]

    def hold(self, key: ContextKey, holds: Sequence[Hold], release: bool) -> None:
        """Hold further arms at batch ranges of a context. release: True to end earlier holds first."""
        self.guards.hold(self.registry.contexts[key], holds, release)
        self._forget_tables(key)

    def in_use(self, key: ContextKey) -> Table:
        """The arms that workers of a context use, unless they are isolated."""
        return self.guards.in_use(key, self.estimators[key].table())

    def _forget_tables(self, key: ContextKey) -> None:
        self._tables.pop(key, None)
        self._learned.pop(key, None)

    def refresh(self) -> None:
        """Compute expected times again. Called about once a second."""
        self._tables.clear()
        self._learned.clear()

    def learned(self, key: ContextKey) -> tuple[int, list[ArmEstimate]]:
        """Version of the table, and every row that was learned. Raises KeyError if the context is unknown."""
        estimator = self.estimators[key]
        return estimator.table().version, estimator.rows()
