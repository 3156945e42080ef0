"""The guards of all contexts (`speclen.controller.baseline`), which the learner asks for tables and trials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from speclen.controller.baseline.guard import Guard, Verdict, arm_of, range_of
from speclen.controller.service.journal import Journal
from speclen.controller.service.registry import Context, Worker
from speclen.records import Choice, ContextKey, Decision, Hold, Probe, StepRecord, Table, Trial

log = structlog.get_logger()

SHADOW = "shadow"


class View(NamedTuple):
    """The parts of a worker that its table depends on. own: its id if it is isolated, else ""."""

    own: str
    baseline: tuple[Choice, ...]
    is_shadow: bool


def view_of(worker: Worker, own: str) -> View:
    """The view of a worker, which may be isolated."""
    return View(own, worker.baseline, worker.policy == SHADOW)


class Guards:
    """The guards of all contexts, with their trials and holds. Used by the learner's thread only."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.guards: dict[ContextKey, Guard] = {}
        self._ended: set[ContextKey] = set()  # whose trials failed
        self._views: dict[ContextKey, View] = {}  # the newest of workers that are not isolated

    def of(self, key: ContextKey) -> Guard:
        """The guard of a context, created if necessary."""
        return self.guards.setdefault(key, Guard())

    def restore(self, key: ContextKey, trials: Iterable[Trial], holds: Sequence[Hold]) -> None:
        """Take what an earlier process stored, in order."""
        self.of(key).holds = tuple(holds)
        with self._ending_on_failure(key) as guard:
            for trial in trials:
                guard.take(range_of(trial.batch_size), trial)
                guard.num_trials += 1

    def table(self, key: ContextKey, learned: Table, view: View) -> Table:
        """The table that a worker uses."""
        if not view.own:
            self._views[key] = view
        return self.of(key).overrule(learned, view.baseline, view.is_shadow)

    def in_use(self, key: ContextKey, learned: Table) -> Table:
        """The table of workers that are not isolated, with the baseline of the newest one."""
        return self.table(key, learned, self._views.get(key, View("", (), False)))

    def observe(self, worker: Worker, steps: Sequence[StepRecord], learned: Table, group_id: int) -> list[Decision]:
        """Learn from consecutive steps, keep finished trials, and return the changes that these caused."""
        context, decisions = worker.context, list[Decision]()
        if context.key in self._ended:
            return decisions
        with self._ending_on_failure(context.key) as guard:
            for found in guard.observe(worker.worker_id, steps, worker.transition_steps, worker.limits):
                if isinstance(found, Trial):
                    self.journal.note_trial(context, found, worker, group_id)
                else:
                    decisions.append(self._decision(context.key, found, learned, worker.baseline))
        return decisions

    @contextmanager
    def _ending_on_failure(self, key: ContextKey) -> Iterator[Guard]:
        """The guard of a context. If it fails, its trials end, and the learned arms and holds stay in use."""
        guard = self.of(key)
        try:
            yield guard
        except Exception:
            log.exception("the comparison with the baseline failed and ends; learned arms are used", context=str(key))
            self._ended.add(key)
            self.guards[key] = Guard(guard.settings)
            self.guards[key].holds, self.guards[key].version = guard.holds, guard.version + 1

    def _decision(self, key: ContextKey, verdict: Verdict, learned: Table, baseline: Sequence[Choice]) -> Decision:
        low, high = verdict.batch_min, min(verdict.batch_max, learned.choices[-1].batch_max)
        arms = [learned.arm_for(low), arm_of(baseline, low)]
        before, after = arms if verdict.uses_baseline else arms[::-1]
        version = learned.version + self.of(key).version
        return Decision(key, low, high, version, before, after, None, None, verdict.reason)

    def next_trial(self, worker: Worker, learned: Table) -> Probe | None:
        """A trial for the worker's next steps; mostly None."""
        key, shadow = worker.context.key, worker.policy == SHADOW
        with self._ending_on_failure(key) as guard:
            if key not in self._ended:
                return guard.next_trial(worker.worker_id, worker.last_batch_size, learned, worker.baseline, shadow)
        return None

    def hold(self, context: Context, holds: Sequence[Hold], release: bool) -> None:
        """Hold further arms at batch ranges. release: True to end earlier holds first."""
        guard = self.of(context.key)
        guard.hold(holds, release)
        self.journal.note_holds(context, guard.holds)
