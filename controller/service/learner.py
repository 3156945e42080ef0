"""Learning: each worker's waiting reports in one call of the estimator, then decisions, a probe, and rows for the disk."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from speclen.controller.estimator import Contexts
from speclen.controller.service.guards import SHADOW, Guards, View, view_of
from speclen.controller.service.prediction import PredictionError
from speclen.controller.service.registry import Context, Registry, Worker
from speclen.controller.service.sampling import Sampling
from speclen.controller.service.saving.journal import Journal
from speclen.records import ArmEstimate, ContextKey, Decision, DriftEvent, Hold, Limits, Profile, Table

log = structlog.get_logger()

# Seconds for which reports wait for others: one call of the estimator costs little more for many than for one.
LEARN_INTERVAL_S = 0.2
# So many reports do not wait: no group becomes larger.
MANY_REPORTS = 512
# The same while a context has learned from fewer than MANY_REPORTS: a cold start must choose anew within some steps.
FEW_REPORTS = 8
# Workers with another policy do not use the table: a probe would be lost on them.
FOLLOWS_TABLE = ("", "adaptive", SHADOW)


@dataclass(slots=True)
class Totals:
    """Counts since the start of the process.

    num_reports: learned from, in num_groups calls. refused: by reason. drift: by factor.
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
    """Gives reports to the estimator, and answers from it. On one thread. last_group_id: of the newest call."""

    def __init__(
        self,
        estimator: Contexts,
        registry: Registry,
        journal: Journal,
        totals: Totals,
        last_group_id: int = 0,
    ) -> None:
        self.estimator = estimator
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

    def expect(self, worker: Worker) -> bool:
        """Note that reports of a worker wait, if any do, and learn from them at once where they are not to wait."""
        num_waiting = len(worker.waiting)
        if num_waiting:
            self._waiting[worker.worker_id] = worker
        if num_waiting >= (FEW_REPORTS if worker.context.num_learned < MANY_REPORTS else MANY_REPORTS):
            self.learn(worker)
        return num_waiting > 0

    async def run(self) -> None:
        """Learn a few times a second; cancel to stop."""
        while True:
            await asyncio.sleep(LEARN_INTERVAL_S)
            await self.learn_all()

    async def learn_all(self) -> None:
        """Learn from everything that waits now, and pause between workers for as long as each took: messages go on."""
        for worker in list(self._waiting.values()):
            started = time.perf_counter()
            with self.sampling.measured():
                self.learn(worker)
            await asyncio.sleep(time.perf_counter() - started)

    def learn(self, worker: Worker) -> None:
        """Learn from all reports of the worker that wait, in one call of the estimator."""
        self._waiting.pop(worker.worker_id, None)
        steps, worker.waiting = worker.waiting, []
        if not steps:
            return
        context = worker.context
        worker.last_batch_size, worker.last_step_s = steps[-1].batch_size, steps[-1].latency_s
        try:
            prediction = self.prediction.setdefault(context.key, PredictionError())
            prediction.add(self.table(worker)[0], steps)
            outcome = self.estimator.observe(context.key, steps, worker.worker_id)
        except Exception as error:  # else every resent report would repeat the crash
            log.exception("the estimator failed, a group is not learned from", worker=worker.worker_id)
            self.totals.refused["estimator"] += len(steps)
            worker.note_refusals(len(steps), f"the estimator failed ({error})")
            self.journal.note_worker(worker)
            self._start_anew(context)  # its state may be damaged
            return
        self.last_group_id += 1
        context.num_learned += len(steps)
        worker.num_reports += len(steps)
        self.totals.num_groups += 1
        self.totals.num_reports += len(steps)
        self.journal.note_reports(worker, steps, self.last_group_id)
        self._note(outcome.decisions, outcome.drift_events)
        if worker.policy in FOLLOWS_TABLE:
            self._note(self.guards.observe(worker, steps, self._learned_table(worker), self.last_group_id), ())
            self._take_probe(worker)

    def _start_anew(self, context: Context) -> None:
        try:
            outcome = self.estimator.start_anew(context.key, "the estimator failed")
        except Exception:
            log.exception("a context cannot start anew", context=str(context.key))
            return
        self._note(outcome.decisions, outcome.drift_events)

    def _note(self, decisions: Sequence[Decision], drift_events: Sequence[DriftEvent]) -> None:
        """Count, keep and apply what changed."""
        self.totals.num_decisions += len(decisions)
        for decision in decisions:
            self._forget_tables(decision.context)
            self.journal.note_decision(self.registry.contexts[decision.context], decision, self.last_group_id)
        for event in drift_events:
            self._forget_tables(event.context)
            self.totals.drift[event.factor] += 1
            if event.factor == "reset":
                log.error("a context starts anew", context=str(event.context), reason=event.detail)
            self.journal.note_drift(self.registry.contexts[event.context], event, self.last_group_id)

    def _take_probe(self, worker: Worker) -> None:
        """Ask for a trial or an exploratory arm for the worker's next steps; mostly there is none.

        A probe that no longer fits the worker's batch size makes way: it could wait for ever.
        """
        waiting = worker.probe
        fits = waiting is not None and waiting.batch_min <= worker.last_batch_size <= waiting.batch_max
        if fits:
            return
        worker.probe = self.guards.next_trial(worker, self._learned_table(worker))
        if worker.probe is not None:
            return
        try:
            worker.probe = self.estimator.take_probe(
                worker.context.key,
                worker.worker_id,
                batch_size=worker.last_batch_size,
                limits=worker.limits,
                num_steps=worker.probe_steps,
            )
        except Exception:
            log.exception("the estimator failed to give a probe", context=str(worker.context.key))
            self._start_anew(worker.context)
        self.totals.num_probes += worker.probe is not None

    # Contexts.

    def prepare(self, context: Context) -> None:
        """Let the estimator know a context that was made or widened."""
        key = context.key
        before = self.estimator.limits(key) if self.estimator.knows(key) else None
        decisions = self.estimator.add_context(key, context.limits)
        if self.estimator.limits(key) != before:
            self.journal.note_limits(context, self.last_group_id)
            self._forget_tables(key)
        self._note(decisions, ())

    def import_profile(self, key: ContextKey, profile: Profile) -> int:
        """Seed a context, known or new; returns the profile's id. Raises FullError."""
        lengths = len(profile.survival), *(cell.speculation_length for cell in profile.cells)
        context = self.registry.context(key, Limits(max(cell.batch_size for cell in profile.cells), max(lengths)))
        self.prepare(context)
        profile_id = self.journal.note_profile(context, profile, self.last_group_id)
        self._note(self.estimator.seed_profile(key, profile), ())
        self._forget_tables(key)
        return profile_id

    # Answers.

    def table(self, worker: Worker) -> tuple[Table, View]:
        """The table in use, and what it depends on beside the context.

        Arms are of this moment, expected times at most as old as `refresh` allows.
        """
        view = view_of(worker, self._own(worker))
        tables = self._tables.setdefault(worker.context.key, {})
        table = tables.get(view)
        if table is None:
            table = tables[view] = self.guards.table(worker.context.key, self._learned_table(worker), view)
        return table, view

    def _own(self, worker: Worker) -> str:
        """The worker's id if it is isolated, else ""."""
        return worker.worker_id if self.estimator.is_isolated(worker.context.key, worker.worker_id) else ""

    def _learned_table(self, worker: Worker) -> Table:
        """The learned arms for a worker, whether or not they are in use."""
        own, tables = self._own(worker), self._learned.setdefault(worker.context.key, {})
        if own not in tables:
            tables[own] = self.estimator.table(worker.context.key, own)
        return tables[own]

    def hold(self, key: ContextKey, holds: Sequence[Hold], release: bool) -> None:
        """Hold more arms at ranges of batch sizes of a context. release: end what was held before."""
        self.guards.hold(self.registry.contexts[key], holds, release)
        self._forget_tables(key)

    def in_use(self, key: ContextKey) -> Table:
        """Arms that the workers of a context use, unless they are isolated."""
        return self.guards.in_use(key, self.estimator.table(key))

    def _forget_tables(self, key: ContextKey) -> None:
        self._tables.pop(key, None)
        self._learned.pop(key, None)

    def refresh(self) -> None:
        """Have expected times computed anew. To be called about once a second."""
        self._tables.clear()
        self._learned.clear()

    def learned(self, key: ContextKey) -> tuple[int, list[ArmEstimate]]:
        """Version of the table and every row learned. Raises KeyError for an unknown context."""
        return self.estimator.table(key).version, self.estimator.rows(key)
