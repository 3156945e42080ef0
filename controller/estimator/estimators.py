"""The estimators of a controller, by context."""

from __future__ import annotations

from collections.abc import Sequence

from speclen.controller.estimator.estimator import Estimator, Outcome
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.records import ContextKey, Decision, DriftEvent, Limits


class Estimators(dict[ContextKey, Estimator]):
    """One estimator for each context, oldest first. One thread uses it."""

    def __init__(self, settings: EstimatorSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or EstimatorSettings()

    def add(self, key: ContextKey, limits: Limits, first_survival: Sequence[float] | None = None) -> list[Decision]:
        """Add a context, or widen it; returns the choices that this brought.

        first_survival: guess of a new context's acceptance, as in a `Profile`; by default that of the context of its pair
        with the most evidence.
        """
        if key in self:
            return self[key].widen(limits)
        if first_survival is None:
            alike = [each.survival() for each in self.values() if each.key.pair == key.pair]
            best = max(alike, key=lambda survival: survival[0][1] if survival else 0.0, default=[])
            first_survival = [chance for chance, _ in best]
        estimator = self[key] = Estimator(self.settings, limits, key)
        estimator.guess(first_survival)
        return estimator.decisions("the context was added")

    def reset(self, key: ContextKey, reason: str) -> Outcome:
        """Forget what was learned of a context."""
        estimator = self[key] = self[key].reset()
        event = DriftEvent(key, "reset", 0.0, f"{reason}: what was learned of this context was forgotten")
        return Outcome(estimator.decisions("the context was reset"), [event])
