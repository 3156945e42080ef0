"""The estimators of a controller, one for each context."""

from __future__ import annotations

from collections.abc import Sequence

from speclen.controller.estimator.estimator import Estimator, Outcome
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.records import (
    ArmEstimate,
    ContextKey,
    Decision,
    DriftEvent,
    Limits,
    Probe,
    Profile,
    StepRecord,
    Table,
)


class Contexts:
    """Estimators by context. Calls with the key of an unknown context raise KeyError. One thread calls it."""

    def __init__(self, settings: EstimatorSettings | None = None) -> None:
        self.settings = settings or EstimatorSettings()
        self._estimators: dict[ContextKey, Estimator] = {}

    @property
    def contexts(self) -> tuple[ContextKey, ...]:
        """Keys of all contexts, oldest first."""
        return tuple(self._estimators)

    def knows(self, key: ContextKey) -> bool:
        """True if the context was added."""
        return key in self._estimators

    def limits(self, key: ContextKey) -> Limits:
        """Largest limits of a context's workers."""
        return self._estimators[key].limits

    def add_context(self, key: ContextKey, limits: Limits) -> list[Decision]:
        """Make a context known, or widen it; returns the choices that this brought.

        The first guess of a new context is the acceptance of the context of its pair with the most evidence.
        """
        known = self._estimators.get(key)
        if known is not None:
            return known.widen(limits)
        alike = [each.survival() for each in self._estimators.values() if each.key.pair == key.pair]
        estimator = self._estimators[key] = Estimator(self.settings, limits, key)
        if alike:
            best = max(alike, key=lambda survival: survival[0][1] if survival else 0.0)
            estimator.guess([chance for chance, _ in best])
        return estimator.decisions("the context was added")

    def seed_profile(self, key: ContextKey, profile: Profile) -> list[Decision]:
        """Seed a context that has learned nothing yet. Raises ValueError for cells beyond the limits."""
        return self._estimators[key].seed(profile)

    def observe(self, key: ContextKey, records: Sequence[StepRecord], worker_id: str = "") -> Outcome:
        """Learn from consecutive steps of one worker, already validated."""
        return self._estimators[key].observe(records, worker_id)

    def start_anew(self, key: ContextKey, reason: str) -> Outcome:
        """Forget what was learned of a context."""
        estimator = self._estimators[key] = self._estimators[key].reset()
        event = DriftEvent(key, "reset", 0.0, f"{reason}: what was learned of this context was forgotten")
        return Outcome(estimator.decisions("the context was reset"), [event])

    def table(self, key: ContextKey, worker_id: str = "") -> Table:
        """The arm in use at every batch size for a worker."""
        return self._estimators[key].table(worker_id)

    def take_probe(
        self,
        key: ContextKey,
        worker_id: str = "",
        batch_size: int | None = None,
        limits: Limits | None = None,
        num_steps: int = 3,
    ) -> Probe | None:
        """An exploratory arm for the next steps of a worker; mostly None. See `Estimator.probe`."""
        return self._estimators[key].probe(worker_id, batch_size, limits, num_steps)

    def rows(self, key: ContextKey) -> list[ArmEstimate]:
        """The learned table: one row per batch range and arm."""
        return self._estimators[key].rows()

    def survival(self, key: ContextKey) -> list[tuple[float, float]]:
        """P(the first i draft tokens are all accepted), and the evidence for it, by position."""
        return self._estimators[key].survival()

    def is_isolated(self, key: ContextKey, worker_id: str) -> bool:
        """True if a worker differs from the others and has a table of its own."""
        return self._estimators[key].is_isolated(worker_id)

    def num_isolated(self, key: ContextKey) -> int:
        """Workers of a context that have tables of their own."""
        return self._estimators[key].num_isolated

    def save(self, key: ContextKey) -> bytes:
        """Everything that was learned of a context, as JSON."""
        return self._estimators[key].save()

    def restore(self, key: ContextKey, content: bytes) -> None:
        """Continue from what was saved of a context that was added. ValueError, and no change, for anything else."""
        self._estimators[key].restore(content)
