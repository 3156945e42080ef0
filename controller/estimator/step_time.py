"""Step times, learned from contrasts between steps that are neighbours in time.

    log T_t = level_t + theta(cell_t) + noise        theta(cell) = log(sum_i exp(phi_i) f_i(cell)) + rho(cell)

level_t is whatever slows all arms alike: clocks, the host, neighbours, warm-up. It wanders, a random walk of variance q a
step beside noise of variance r. So each step is compared with an exponential mean of the steps before it, with the gain of
the steady Kalman filter, K^2 / (1 - K) = q / r: what is left are innovations, which are independent. Steps of one cell tell
q and r: half the squared difference of two, L steps apart, is r + q L / 2 on average. A contrast is a row c (1 at its own
cell, minus the weights of the cells before), and what contrasts say of theta is summed up exactly by

    M = sum c c' / sigma^2        z = sum c d / sigma^2        d: the difference of log times

with exponential forgetting. Cells are (range of batch sizes, arm). At times theta is solved for: phi, the log weights of a
monotone surface, by Gauss-Newton with rho ~ N(0, v) integrated out, then rho. The joint covariance gives the uncertainty of
one arm relative to another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.features import NUM_FEATURES, PRIOR_MEAN, PRIOR_PRECISION, shares
from speclen.controller.estimator.saving import Array

NEIGHBOURS = 64  # steps before that a step is compared with
FAR = 16  # steps between those that tell how the level wanders


class Samples(NamedTuple):
    """Usable steps of one worker in order. cells: places, [n]; log_s: log step times, [n]."""

    cells: np.ndarray
    log_s: np.ndarray


@dataclass(eq=False)
class Tail:
    """Newest samples of one worker, which its next ones are compared with, and its level.

    level: mean of log times without theta, for display. near, far: mean distance of the log times of steps of one cell, 1
    and FAR steps apart.
    """

    cells: Array = field(default_factory=lambda: np.zeros(0, int))
    log_s: Array = field(default_factory=lambda: np.zeros(0))
    level: float = 0.0
    num_samples: int = 0
    near: float = field(default_factory=lambda: settings.current.noise)
    far: float = field(default_factory=lambda: _first_far())

    @property
    def gain(self) -> float:
        """Weight of the newest step before, in steps of a factor of 1.4."""
        wander = max(0.0, 2.0 * (self.far**2 - self.near**2) / (FAR - 1))
        ratio = wander / max(self.near**2 - wander / 2, settings.current.least_sd**2 / 4)
        gain = (np.sqrt(ratio**2 + 4 * ratio) - ratio) / 2
        return float(
            np.clip(
                2.0 ** (round(2 * np.log2(gain + 1e-9)) / 2), settings.current.least_gain, settings.current.first_gain
            )
        )

    def followed_by(self, samples: Samples) -> Samples:
        """The tail and the next samples."""
        return Samples(np.append(self.cells, samples.cells), np.append(self.log_s, samples.log_s))

    def move(self, window: Samples, num_new: int, theta: np.ndarray) -> None:
        """Keep the newest of a window, and follow the level."""
        self.num_samples += num_new
        level = float((window.log_s[-num_new:] - theta[window.cells[-num_new:]]).mean())
        self.level += min(num_new / min(self.num_samples, settings.current.short_memory), 1.0) * (level - self.level)
        self.near += _step_towards(self.near, _distances(window, num_new, 1))
        self.far += _step_towards(self.far, _distances(window, num_new, FAR))
        self.cells, self.log_s = window.cells[-NEIGHBOURS:], window.log_s[-NEIGHBOURS:]

    def keep(self, place: np.ndarray) -> None:
        """Follow cells to other places, -1 for those that are forgotten."""
        cells = place[self.cells]
        self.cells, self.log_s = cells[cells >= 0], self.log_s[cells >= 0]


@dataclass(eq=False)
class Evidence:
    """Contrasts of one worker, or of several. information: M, [cells, cells]; moment: z, [cells].

    count, log_sum: samples by cell and the sum of their log times, fading; noise: standard deviation of a contrast.
    """

    information: Array = field(default_factory=lambda: np.zeros((0, 0)))
    moment: Array = field(default_factory=lambda: np.zeros(0))
    count: Array = field(default_factory=lambda: np.zeros(0))
    log_sum: Array = field(default_factory=lambda: np.zeros(0))
    noise: float = field(default_factory=lambda: settings.current.noise)

    def grow(self, num_cells: int) -> None:
        """Make room for new cells."""
        more = num_cells - len(self.moment)
        if more > 0:
            self.information = np.pad(self.information, (0, more))
            self.moment, self.count, self.log_sum = (
                np.pad(values, (0, more)) for values in (self.moment, self.count, self.log_sum)
            )

    def keep(self, kept: np.ndarray) -> None:
        """Forget all cells but these."""
        self.information = self.information[np.ix_(kept, kept)]
        self.moment, self.count, self.log_sum = self.moment[kept], self.count[kept], self.log_sum[kept]

    def absorb(self, other: Evidence) -> None:
        """Take the evidence of a worker that has left."""
        self.grow(len(other.moment))
        other.grow(len(self.moment))
        for name in ("information", "moment", "count", "log_sum"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def fade(self, factor: float) -> None:
        """Let everything count for less."""
        for values in (self.information, self.moment, self.count, self.log_sum):
            values *= factor

    def add(self, tail: Tail, samples: Samples, theta: np.ndarray, variance: np.ndarray) -> None:
        """Learn from the next samples of a worker.

        theta, variance: estimate of every cell and its variance, for the clipping.
        """
        num_new = len(samples.log_s)
        self.fade(float(np.exp(-num_new / settings.current.memory)))
        np.add.at(self.count, samples.cells, 1.0)
        np.add.at(self.log_sum, samples.cells, samples.log_s)
        window = tail.followed_by(samples)
        rows = _rows(num_new, len(window.log_s), tail.gain)
        if not len(tail.log_s):
            rows = rows[1:]  # nothing to compare the first sample with
        known = np.array(list(dict.fromkeys(window.cells.tolist())))
        one_hot = (window.cells[:, None] == known).astype(float)
        contrasts, differences = rows @ one_hot, rows @ window.log_s
        self._add_contrasts(known, contrasts, differences, theta[known], variance[known])
        tail.move(window, num_new, theta)

    def _add_contrasts(
        self, known: np.ndarray, contrasts: np.ndarray, differences: np.ndarray, theta: np.ndarray, variance: np.ndarray
    ) -> None:
        """Sum contrasts up, and learn how noisy they are."""
        surprise, believed = differences - contrasts @ theta, contrasts**2 @ variance
        noise = self.noise**2
        spread = np.sqrt(noise + believed)
        z = np.abs(surprise) / spread
        weighted = (
            contrasts * (np.minimum(1.0, settings.current.clip / np.maximum(z, settings.current.clip)) / noise)[:, None]
        )
        self.information[np.ix_(known, known)] += weighted.T @ contrasts
        self.moment[known] += weighted.T @ differences
        if len(z):
            clipped = (np.minimum(z, settings.current.clip) * spread) ** 2
            own = np.maximum(clipped - believed, 0.25 * clipped).mean() * settings.current.clipped_loss
            share = min(len(z) / settings.current.short_memory, 0.5)
            self.noise = max(float(np.sqrt((1.0 - share) * noise + share * own)), settings.current.least_sd)


def _first_far() -> float:
    now = settings.current
    return now.noise * float(np.sqrt(1.0 + now.first_gain**2 / (1.0 - now.first_gain) * (FAR - 1) / 2))


def _distances(window: Samples, num_new: int, lag: int) -> np.ndarray:
    """Of the log times of the new steps and those `lag` steps before them, where both are of one cell."""
    num_pairs = min(num_new, len(window.log_s) - lag)
    if num_pairs <= 0:
        return np.zeros(0)
    new, old = slice(-num_pairs, None), slice(-num_pairs - lag, -lag)
    distances: np.ndarray = np.abs(window.log_s[new] - window.log_s[old])
    return distances[window.cells[new] == window.cells[old]]


def _step_towards(mean: float, values: np.ndarray) -> float:
    """Change of a fading mean."""
    return min(len(values) / settings.current.short_memory, 0.5) * (float(values.mean()) - mean) if len(values) else 0.0


@lru_cache(256)
def _rows(num_new: int, num_all: int, gain: float) -> np.ndarray:
    """Contrast of each new step with those before it, [num_new, num_all]: 1 for itself, minus the weights of the mean."""
    at, all_at = np.arange(num_all - num_new, num_all)[:, None], np.arange(num_all)
    lag = at - all_at
    weights = np.where((lag > 0) & (lag <= NEIGHBOURS), (1.0 - gain) ** np.maximum(lag - 1, 0), 0.0)
    total = weights.sum(axis=1, keepdims=True)
    rows: np.ndarray = (lag == 0) - weights / np.where(total > 0, total, 1.0)
    return rows


@dataclass(frozen=True, eq=False)
class Solution:
    """Estimated step times, apart from the level.

    phi, covariance: of the surface. rho, shrinkage G and reach G J: of active cells; residual: variance of rho.
    """

    phi: Array
    covariance: Array
    rho: Array
    shrinkage: Array
    reach: Array
    residual: float


NOTHING = Solution(
    PRIOR_MEAN,
    np.linalg.inv(PRIOR_PRECISION),
    np.zeros(0),
    np.zeros((0, 0)),
    np.zeros((0, NUM_FEATURES)),
    settings.current.residual**2,
)  # before any step


def solve(information: np.ndarray, moment: np.ndarray, features: np.ndarray, last: Solution = NOTHING) -> Solution:
    """The most probable surface and residuals. features: [cells, NUM_FEATURES] of the cells; last: to begin with."""
    phi, residual = last.phi, last.residual
    shrinkage = np.linalg.inv(np.eye(len(moment)) + residual * information)
    effective = shrinkage @ information
    effective = (effective + effective.T) / 2
    for _ in range(3):
        log_mean, gradient = shares(features, phi)
        pull = gradient.T @ (shrinkage @ (moment - information @ log_mean)) - PRIOR_PRECISION @ (phi - PRIOR_MEAN)
        precision = gradient.T @ effective @ gradient + PRIOR_PRECISION
        step = np.linalg.solve(precision, pull)
        phi = phi + np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 0.01:
            break
    log_mean, gradient = shares(features, phi)
    precision = gradient.T @ effective @ gradient + PRIOR_PRECISION
    rho = residual * (shrinkage @ (moment - information @ log_mean))
    spread = rho**2 + residual * np.diag(shrinkage)
    weight = np.diag(information) * residual
    known = weight / (1.0 + weight)
    new = float((known * spread).sum() + 8 * settings.current.residual**2) / float(known.sum() + 8)
    new = max(new, settings.current.least_sd**2)
    return Solution(phi, np.linalg.inv(precision), rho, shrinkage, shrinkage @ gradient, new)
