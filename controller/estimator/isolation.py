"""Comparison of workers: every COMPARED reports a worker's own step times and tokens are held against those of the others.

One that agrees with fewer than half of them is isolated: it has a table of its own, and no influence on the others'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.features import shares
from speclen.controller.estimator.saving import Array
from speclen.controller.estimator.step_time import NOTHING, Evidence, Tail, solve
from speclen.controller.estimator.tokens import TokenEvidence, ratios_of


@dataclass(eq=False)
class Worker:
    """Evidence of one worker. apart: from the others in step times, in tokens.

    theta, precision: its own step times by cell as of the last comparison; speed: its own log tokens per step by class,
    and their variance.
    """

    tokens: TokenEvidence
    tail: Tail = field(default_factory=Tail)
    times: Evidence = field(default_factory=Evidence)
    num_reports: int = 0
    compared_at: int = 0
    last_seen: int = 0
    apart: tuple[bool, bool] = (False, False)
    theta: Array = field(default_factory=lambda: np.zeros(0))
    precision: Array = field(default_factory=lambda: np.zeros(0))
    speed: Array = field(default_factory=lambda: np.zeros((2, 0)))

    @property
    def is_due(self) -> bool:
        """True when it is to be compared."""
        return self.num_reports - self.compared_at >= settings.current.compared

    def note(self, features: np.ndarray, unseen: np.ndarray) -> None:
        """Solve for what this worker alone says. features: of all cells; unseen: acceptance, see `ratios_of`."""
        self.compared_at = self.num_reports
        self.times.grow(len(features))
        information = (self.times.information + self.times.information.T) / 2
        solution = solve(
            information, self.times.moment, features, replace(NOTHING, residual=settings.current.unlike_times**2)
        )
        self.theta, self.precision = shares(features, solution.phi)[0] + solution.rho, np.diag(information).copy()
        ratios = ratios_of([self.tokens], [1.0], unseen)
        length = min(settings.current.compared_length, ratios.steps.shape[2] - 1)
        trials = self.tokens.reached[:, :1].sum(axis=1) + self.tokens.tokens
        self.speed = np.stack([-np.log(ratios.steps[:, 0, length]), 2.0 / np.maximum(trials, 1.0)])

    def agrees_in_times(self, other: Worker) -> bool:
        """True unless step times of both differ by more than a factor, in cells that both have seen."""
        count = min(len(self.theta), len(other.theta))
        weight = np.minimum(self.precision[:count], other.precision[:count])
        num_shared = np.count_nonzero(weight)
        if num_shared < 2:
            return True
        difference = self.theta[:count] - other.theta[:count]
        difference = difference - (weight @ difference) / weight.sum()
        mean_square = float(weight @ difference**2) / float(weight.sum())
        chance = 2 * num_shared / float(weight.sum())  # mean square that noise alone explains
        return mean_square < max(settings.current.unlike_times**2, settings.current.significant * chance)

    def agrees_in_tokens(self, other: Worker) -> bool:
        """True unless accepted tokens of some class differ significantly."""
        if not self.speed.size or not other.speed.size:
            return True
        difference = np.abs(self.speed[0] - other.speed[0])
        spread = np.sqrt(self.speed[1] + other.speed[1])
        return bool((difference <= settings.current.unlike_tokens + settings.current.significant * spread).all())


def is_apart(worker: Worker, others: Iterable[Worker]) -> tuple[bool, bool]:
    """True if a worker differs from more than half of the others: in step times, in tokens."""
    known = [other for other in others if other is not worker and other.compared_at]
    if not known:
        return worker.apart
    times = sum(worker.agrees_in_times(other) for other in known)
    tokens = sum(worker.agrees_in_tokens(other) for other in known)
    return 2 * times < len(known), 2 * tokens < len(known)
