"""Comparison of workers: every COMPARED reports a worker's own step times and tokens are held against those of the others.

One that agrees with fewer than half of them is isolated: it has a table of its own, and no influence on the others'.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from speclen.controller.estimator.features import Prior
from speclen.controller.estimator.step_time import Evidence, Tail, solve
from speclen.controller.estimator.tokens import TokenEvidence, TokenPrior, ratios_of

Array = np.ndarray

COMPARED = 64  # reports of a worker between two comparisons
UNLIKE_TIMES = 0.12  # root mean square difference of log times, beyond a constant factor
UNLIKE_TOKENS = 0.2  # difference of log tokens per step
COMPARED_LENGTH, COMPARED_TRIALS = 4, 200.0  # draft tokens at which tokens are compared, and the evidence that takes
SIGNIFICANT = 3.0  # standard deviations
UNKNOWN = 1e6  # variance of what was not seen


class Worker:
    """Evidence of one worker. apart: from the others in step times, in tokens."""

    STATE = ("num_reports", "compared_at", "last_seen", "apart", "theta", "precision", "speed")

    def __init__(self, num_features: int, max_length: int) -> None:
        self.tail, self.times, self.tokens = Tail(num_features), Evidence(), TokenEvidence(max_length)
        self.num_reports = self.compared_at = self.last_seen = 0
        self.apart = np.zeros(2, dtype=bool)
        self.theta, self.precision = np.zeros(0), np.zeros(0)  # own step times by cell as of the last comparison
        self.speed = np.zeros((2, 0))  # own log tokens per step by class, and their variance

    @property
    def is_due(self) -> bool:
        """True when it is to be compared."""
        return self.num_reports - self.compared_at >= COMPARED

    def note(self, features: Array, prior: Prior, token_prior: TokenPrior) -> None:
        """Solve for what this worker alone says."""
        self.compared_at = self.num_reports
        self.times.grow(len(features))
        information = (self.times.information + self.times.information.T) / 2
        solution = solve(information, self.times.moment, features, prior, prior.mean, UNLIKE_TIMES**2)
        log_mean = np.log(features @ np.exp(solution.phi))
        self.theta, self.precision = log_mean + solution.rho, np.diag(information).copy()
        ratios = ratios_of([self.tokens], [1.0], token_prior)
        length = min(COMPARED_LENGTH, ratios.steps.shape[2] - 1)
        trials = self.tokens.reached[:, :1].sum(axis=1) + self.tokens.tokens
        variance = np.where(trials >= COMPARED_TRIALS, 2.0 / np.maximum(trials, 1.0), UNKNOWN)
        self.speed = np.stack([-np.log(ratios.steps[:, 0, length]), variance])

    def agrees_in_times(self, other: Worker) -> bool:
        """True unless step times of both differ by more than a factor, in cells that both have seen."""
        count = min(len(self.theta), len(other.theta))
        weight = np.minimum(self.precision[:count], other.precision[:count])
        if np.count_nonzero(weight) < 2:
            return True
        difference = self.theta[:count] - other.theta[:count]
        difference = difference - (weight @ difference) / weight.sum()
        mean_square = float(weight @ difference**2) / float(weight.sum())
        chance = float(np.count_nonzero(weight)) / float(weight.sum())  # mean square that noise alone explains
        return mean_square < UNLIKE_TIMES**2 or mean_square < SIGNIFICANT * 2 * chance

    def agrees_in_tokens(self, other: Worker) -> bool:
        """True unless accepted tokens of some class differ significantly."""
        if not self.speed.size or not other.speed.size:
            return True
        difference = np.abs(self.speed[0] - other.speed[0])
        spread = np.sqrt(self.speed[1] + other.speed[1])
        return bool((difference <= UNLIKE_TOKENS + SIGNIFICANT * spread).all())


def is_apart(worker: Worker, others: Iterable[Worker]) -> Array:
    """[2] of bool, for step times and for tokens: True if a worker differs from more than half of the others."""
    known = [other for other in others if other is not worker and other.compared_at]
    if not known:
        return worker.apart
    times = sum(worker.agrees_in_times(other) for other in known)
    tokens = sum(worker.agrees_in_tokens(other) for other in known)
    return np.array([2 * times < len(known), 2 * tokens < len(known)])
