"""Step times, learned from contrasts between steps that are neighbours in time.

    log T_t = level_t + theta(cell_t) + noise        theta(cell) = log(sum_i exp(phi_i) f_i(cell)) + rho(cell)

level_t is whatever slows all arms alike, such as clocks, the host, other load, or warm-up. So each step is compared with an
exponential mean of the worker's steps before it. A contrast is a row c (1 at its own cell, minus the weights of the cells
before) with the difference d of log times, and all contrasts of a group of workers are summed up in

    M = sum c c' / sigma^2        z = sum c d / sigma^2

with exponential forgetting. A solution has phi, the log weights of a monotone surface, by Gauss-Newton with the residuals
rho ~ N(0, v) integrated out, then rho. A profile is a prior of phi, and counts for less as contrasts contradict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.grid import (
    MAX_ARMS,
    PRIOR_MEAN,
    PRIOR_PRECISION,
    Array,
    Cells,
    Grid,
    features_of,
    shares,
)
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.records import StepRecord

TAIL = 64  # steps before that a step is compared with
# Two lags, in steps, from which the drift of the level is estimated. Not 1, since overlapping steps share time.
NEAR, FAR = 4, 16
LEAST_GAIN = 0.05
CHUNK = 64  # steps learned from at once: small enough that BLAS uses one thread
SURPRISE_MEMORY = 16.0  # contrasts over which surprises are averaged
OTHER_MACHINE = 2.5  # change of the log level after which a lone worker's step times are forgotten
LEVEL_MEMORY = 300.0  # usable samples over which noise is averaged; ten times as many over which observed times are
LARGEST = 1.0  # log difference from the estimate at which samples are clipped


def samples_of(records: Sequence[StepRecord], grid: Grid) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of the cells of steps, the steps' features, and their seconds."""
    columns = []
    for record in records:
        (length, ngram), drafted = record.arm, record.num_drafted_sequences
        # Where all sequences had an n-gram match, the step took the time of n-grams alone.
        passes = length if drafted or not ngram else 0
        columns.append((record.batch_size, passes if drafted else 0, drafted, record.num_verified_tokens,
                        record.mean_context_length, record.latency_s, 2 * passes + ngram))  # fmt: skip
    table = np.array(columns, dtype=float).T
    numbers = grid.range_of[table[0].astype(int)] * MAX_ARMS + table[6].astype(int)
    return numbers, features_of(table[:5]), table[5]


class Contrasts(NamedTuple):
    """Contrasts of some steps. cells: those with a weight; weights: [n, cells]; differences: of log times, [n]."""

    cells: np.ndarray
    weights: np.ndarray
    differences: np.ndarray


@dataclass(eq=False)
class Recent:
    """The newest usable samples of one worker.

    cells, log_s: of each. level: median of their log times without theta, None before the first. distances: between log
    times of one cell, NEAR and FAR steps apart, and how many, fading, [2, 2]. surprise: mean square of the newest
    errors, in variances.
    """

    cells: Array = field(default_factory=lambda: np.zeros(0, int))
    log_s: Array = field(default_factory=lambda: np.zeros(0))
    level: float | None = None
    surprise: float = 1.0
    distances: Array = field(default_factory=lambda: np.zeros((2, 2)))

    def contrasts(self, cells: np.ndarray, log_s: np.ndarray, most: float) -> Contrasts:
        """Contrasts of the next samples with those before them, which they join. most: largest gain."""
        num_new, first, gain = len(cells), len(self.cells) == 0, self.gain(most)
        cells, log_s = np.append(self.cells, cells), np.append(self.log_s, log_s)
        known = np.array(sorted(set(cells.tolist())))
        rows = _rows(num_new, len(cells), gain)[int(first) :]
        self.distances *= exp(-num_new / LEVEL_MEMORY)
        for at, lag in enumerate((NEAR, FAR)):
            begin = max(len(cells) - num_new, lag)
            before = slice(begin - lag, max(len(cells) - lag, 0))
            apart = np.abs(log_s[begin:] - log_s[before])[cells[begin:] == cells[before]]
            self.distances[:, at] += float(apart.sum()), len(apart)
        self.cells, self.log_s = cells[-TAIL:], log_s[-TAIL:]
        return Contrasts(known, rows @ (cells[:, None] == known), rows @ log_s)

    def gain(self, most: float) -> float:
        """Weight of the newest step in the mean that a step is compared with: that of the steady Kalman filter.

        The level is a random walk of variance q a step, plus noise of variance r. The squared mean distance of two
        steps of a cell, L steps apart, is proportional to r + q L / 2, and K^2 / (1 - K) = q / r.
        """
        if self.distances[1].min() < FAR:
            return most
        near, far = ((self.distances[0] / self.distances[1]) ** 2).tolist()
        wander = max(0.0, 2.0 * (far - near) / (FAR - NEAR))
        ratio = wander / max(near - NEAR * wander / 2, 1e-4)
        gain = (np.sqrt(ratio**2 + 4 * ratio) - ratio) / 2
        return min(max(float(2.0 ** (round(2 * np.log2(gain + 1e-9)) / 2)), LEAST_GAIN), most)

    def keep(self, place: np.ndarray) -> None:
        """Forget samples of removed cells. place: new index of each cell, or -1."""
        cells = place[self.cells]
        self.cells, self.log_s = cells[cells >= 0], self.log_s[cells >= 0]


@lru_cache(256)
def _rows(num_new: int, num_all: int, gain: float) -> np.ndarray:
    """Contrast of each new step with those before it, [num_new, num_all]: 1 for itself, minus the weights of the mean."""
    lag = np.arange(num_all - num_new, num_all)[:, None] - np.arange(num_all)
    weights = np.where((lag > 0) & (lag <= TAIL), (1.0 - gain) ** np.maximum(lag - 1, 0), 0.0)
    total = weights.sum(axis=1, keepdims=True)
    rows: np.ndarray = (lag == 0) - weights / np.where(total > 0, total, 1.0)
    return rows


@dataclass(eq=False)
class Times:
    """Step times of a group of workers. information: M, [cells, cells]; moment: z, [cells].

    samples: usable samples by cell and their seconds, fading, and samples, not fading, [3, cells]. noise: variance of a
    contrast; level: of the newest samples. profile: the surface by a profile alone, and its precision, None without one;
    errors: squared errors of contrasts by the profile beyond noise, and their number.
    """

    noise: float
    information: Array = field(default_factory=lambda: np.zeros((0, 0)))
    moment: Array = field(default_factory=lambda: np.zeros(0))
    level: float = 0.0
    samples: Array = field(default_factory=lambda: np.zeros((3, 0)))
    profile: tuple[Array, Array] | None = None
    errors: Array = field(default_factory=lambda: np.zeros(2))

    def grow(self, num_cells: int) -> None:
        """Make room for new cells."""
        more = num_cells - len(self.moment)
        if more > 0:
            self.information = np.pad(self.information, (0, more))
            self.moment = np.pad(self.moment, (0, more))
            self.samples = np.pad(self.samples, ((0, 0), (0, more)))

    def keep(self, kept: np.ndarray, theta: np.ndarray) -> None:
        """Forget all cells but these, taking the others' theta as known. kept: their indices; theta: estimates of all."""
        gone = np.setdiff1d(np.arange(len(self.moment)), kept)
        self.moment = (self.moment - self.information[:, gone] @ theta[gone])[kept]
        self.information = self.information[np.ix_(kept, kept)]
        self.samples = self.samples[:, kept]

    def fade(self, factor: float) -> None:
        """Let contrasts count for less."""
        for values in (self.information, self.moment):
            values *= factor

    def add(self, contrasts: Contrasts, believed: Believed, recent: Recent, s: EstimatorSettings) -> None:
        """Sum contrasts of a worker up, and learn how noisy they are and how wrong the estimates."""
        known, weights, differences = contrasts
        if not len(differences):
            return
        squares = weights * weights
        # Steps that follow each other in one cell carry no information about others, so they do not age it.
        between = np.minimum(squares.sum(axis=1), 1.0)
        num_between = float(between.sum())
        self.fade(exp(-num_between / s.memory))
        error = np.abs(differences - weights @ believed.theta[known])
        variance = squares @ believed.variance[known]
        spread = np.sqrt(variance + self.noise)
        limit = np.minimum(s.clip * spread, LARGEST)
        clipped = np.minimum(error, limit)
        weighted = weights * (clipped / np.maximum(error, 1e-9) / self.noise)[:, None]
        self.information[known[:, None], known] += weighted.T @ weights
        self.moment[known] += weighted.T @ differences
        kept = exp(-num_between / SURPRISE_MEMORY)
        mean_square = float(np.minimum(error / spread, 3.0) ** 2 @ between) / max(num_between, 1e-9)
        recent.surprise = kept * recent.surprise + (1.0 - kept) * mean_square
        square = clipped**2
        own = 1.28 * float(np.maximum(square - variance, 0.25 * square).mean())
        share = min(len(square) / LEVEL_MEMORY, 0.5)
        self.noise = min(max((1.0 - share) * self.noise + share * own, (s.noise / 5) ** 2), (5 * s.noise) ** 2)
        if believed.profiled is not None:
            error = np.minimum(np.abs(differences - weights @ believed.profiled[known]), LARGEST)
            size = squares.sum(axis=1)
            self.errors += float((error**2 - self.noise) @ size), float(size @ size)

    def profile_share(self, sd: float) -> float:
        """Share of the profile's evidence that counts.

        It falls with the third power of the ratio of variances: otherwise a profile that is wrong by a factor would
        prevent probes of arms that it disfavours.
        """
        error, number = self.errors.tolist()
        return min(sd**2 * (8.0 + number) / (8.0 * sd**2 + max(error, 0.0)), 1.0) ** 3

    def set_profile(self, features: np.ndarray, log_s: np.ndarray, errors: np.ndarray, s: EstimatorSettings) -> None:
        """Begin with a profile. features: of its cells; errors: standard deviations of their log seconds."""
        weight, phi = 1.0 / (errors**2 + s.residual**2), PRIOR_MEAN
        for _ in range(8):
            log_mean, gradient = shares(features, phi)
            self.level = float(np.average(log_s - log_mean, weights=weight))
            around = weight[:, None] * (gradient - np.average(gradient, axis=0, weights=weight))
            precision = np.einsum("ni,nj->ij", around, gradient)  # not by BLAS, whose threads may change the last bit
            force = np.einsum("ni,n->i", around, log_s - log_mean) - PRIOR_PRECISION @ (phi - PRIOR_MEAN)
            phi = phi + np.clip(np.linalg.solve(precision + PRIOR_PRECISION, force), -1.0, 1.0)
        self.profile = phi, precision

    def believed(self, cells: Cells, solution: Solution, s: EstimatorSettings) -> Believed:
        """Estimates of all cells, including those added since the solution."""
        theta, gradient = shares(cells.features, solution.phi)
        known, variance = len(solution.rho), np.full(len(theta), s.residual**2)
        theta[:known] += solution.rho
        variance[:known] *= np.diag(solution.shrinkage)
        around = gradient - gradient.mean(axis=0)
        variance += ((around @ solution.covariance) * around).sum(axis=1)
        return Believed(theta, variance, shares(cells.features, self.profile[0])[0] if self.profile else None)

    def count(self, cells: np.ndarray, log_s: np.ndarray, theta: np.ndarray, recent: Recent, alone: bool) -> None:
        """Count usable samples of a worker, and follow its level. alone: it is the only one of the group."""
        level = float(np.sort(recent.log_s - theta[recent.cells])[len(recent.log_s) // 2])
        before, recent.level, self.level = recent.level, level, level
        if alone and before is not None and abs(level - before) > OTHER_MACHINE:
            self.fade(0.0)
            self.samples[:2] = 0.0
            recent.surprise = 1.0
        self.samples[:2] *= exp(-len(cells) / (10.0 * LEVEL_MEMORY))
        seconds = np.exp(np.minimum(log_s, level + theta[cells] + LARGEST))
        np.add.at(self.samples.T, cells, np.stack([np.ones(len(cells)), seconds, np.ones(len(cells))], axis=1))


@dataclass(frozen=True, eq=False)
class Solution:
    """Estimated step times, apart from the level.

    phi: of the surface; covariance: by workers' evidence. rho: residual of each cell; shrinkage: (I + v M)^-1.
    """

    phi: Array
    covariance: Array
    rho: Array
    shrinkage: Array


COLD = Solution(PRIOR_MEAN, np.linalg.inv(PRIOR_PRECISION), np.zeros(0), np.zeros((0, 0)))  # before any step


class Believed(NamedTuple):
    """Estimated theta of cells, its variance, and theta by the profile if there is one, [cells]."""

    theta: np.ndarray
    variance: np.ndarray
    profiled: np.ndarray | None = None


def solve(times: Times, features: np.ndarray, last: Solution, s: EstimatorSettings) -> Solution:
    """The most probable surface and residuals: steps of Gauss-Newton from the last solution. features: of the cells."""
    variance, phi = s.residual**2, last.phi
    left = np.linalg.inv(np.eye(len(features)) + variance * times.information)
    for _ in range(3):
        log_mean, gradient = shares(features, phi)
        pull = left @ (times.moment - times.information @ log_mean)
        own = gradient - left @ gradient
        precision = gradient.T @ own / variance + PRIOR_PRECISION
        force, total = gradient.T @ pull - PRIOR_PRECISION @ (phi - PRIOR_MEAN), precision
        if times.profile:
            profile_phi, added = times.profile[0], times.profile_share(s.profile_sd) * times.profile[1]
            force, total = force - added @ (phi - profile_phi), precision + added
        step = np.clip(np.linalg.solve(total, force), -1.0, 1.0)
        phi = phi + step
        if np.abs(step).max() < 0.1:
            break
    return Solution(phi, np.linalg.inv(precision), variance * pull - own @ step, left)
