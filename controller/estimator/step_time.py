"""Step times, learned from contrasts between steps that are neighbours in time.

    log T_t = level_t + theta(cell_t) + noise        theta(cell) = log(sum_i exp(phi_i) f_i(cell)) + rho(cell)

level_t is whatever slows all arms alike, such as clocks, the host, other load, or warm-up. So each step is compared with an
exponential mean of the steps before it. A contrast is a row c (1 at its own cell, minus the weights of the cells before)
with the difference d of log times, and all contrasts are summed up in

    M = sum c c' / sigma^2        z = sum c d / sigma^2

with exponential forgetting. A solution has phi, the log weights of a monotone surface, by Gauss-Newton with the residuals
rho ~ N(0, v) integrated out, then rho. A profile is a prior of phi and rho, and counts for less as contrasts contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import exp

import numpy as np

from speclen.controller.estimator.grid import (
    PRIOR_MEAN,
    PRIOR_PRECISION,
    Array,
    Grid,
    features_of,
    shares,
)
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.records import Profile

TAIL = 64  # steps before that a step is compared with
# Two lags, in steps, from which the drift of the level is estimated. Not 1, since overlapping steps share time.
NEAR, FAR = 4, 16
LEAST_GAIN = 0.05
CHUNK = 64  # steps learned from at once: small enough that BLAS uses one thread
SURPRISE_MEMORY = 16.0  # contrasts over which surprises are averaged
OTHER_MACHINE = 2.5  # change of the log level after which learned step times are forgotten
LEVEL_MEMORY = 300.0  # usable samples over which noise is averaged; ten times as many over which observed times are
LARGEST = 1.0  # log difference from the estimate at which samples are clipped


def _zeros() -> np.ndarray:
    return np.zeros(0)


@dataclass(eq=False)
class Evidence:
    """Step times of one worker. information: M, [cells, cells]; moment: z, [cells].

    count, sum_s: usable samples by cell and their seconds, fading, and seen: not fading, [cells]. noise: variance of a
    contrast. cells, log_s: of the newest samples. level: median of their log times without theta. distances: between
    log times of one cell, NEAR and FAR steps apart, and how many, fading, [2, 2]. surprise: mean square of the
    newest differences from what was believed, in variances. fit: see `Prior`.
    """

    noise: float
    information: Array = field(default_factory=lambda: np.zeros((0, 0)))
    moment: Array = field(default_factory=_zeros)
    count: Array = field(default_factory=_zeros)
    sum_s: Array = field(default_factory=_zeros)
    seen: Array = field(default_factory=_zeros)
    cells: Array = field(default_factory=lambda: np.zeros(0, int))
    log_s: Array = field(default_factory=_zeros)
    level: float = 0.0
    surprise: float = 1.0
    distances: Array = field(default_factory=lambda: np.zeros((2, 2)))
    fit: Array = field(default_factory=lambda: np.zeros(2))

    def grow(self, num_cells: int) -> None:
        """Make room for new cells."""
        more = num_cells - len(self.moment)
        if more > 0:
            self.information = np.pad(self.information, (0, more))
            for name in ("moment", "count", "sum_s", "seen"):
                setattr(self, name, np.pad(getattr(self, name), (0, more)))

    def keep(self, kept: np.ndarray) -> None:
        """Forget all cells but these. kept: their places."""
        place = np.full(len(self.moment), -1)
        place[kept] = np.arange(len(kept))
        self.information = self.information[np.ix_(kept, kept)]
        for name in ("moment", "count", "sum_s", "seen"):
            setattr(self, name, getattr(self, name)[kept])
        cells = place[self.cells]
        self.cells, self.log_s = cells[cells >= 0], self.log_s[cells >= 0]

    def absorb(self, other: Evidence) -> None:
        """Add the evidence of another worker."""
        self.grow(len(other.moment))
        other.grow(len(self.moment))
        for name in ("information", "moment", "count", "sum_s", "seen", "fit"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def fade(self, factor: float) -> None:
        """Let contrasts count for less."""
        for values in (self.information, self.moment, self.fit):
            values *= factor

    def add(self, cells: np.ndarray, log_s: np.ndarray, believed: Believed, settings: EstimatorSettings) -> None:
        """Learn from the next usable samples. cells: their places; log_s: log seconds, [n] each."""
        num_new, first = len(cells), len(self.cells) == 0
        cells, log_s = np.append(self.cells, cells), np.append(self.log_s, log_s)
        known = np.array(sorted(set(cells.tolist())))
        rows = _rows(num_new, len(cells), self.gain(settings.gain))[int(first) :]
        contrasts, differences = rows @ (cells[:, None] == known), rows @ log_s
        self._add_contrasts(known, contrasts, differences, believed, settings)
        self._add_distances(cells, log_s, num_new)
        self.cells, self.log_s = cells[-TAIL:], log_s[-TAIL:]
        self._follow_level(cells[-num_new:], log_s[-num_new:], believed.theta, settings)

    def _add_contrasts(
        self,
        known: np.ndarray,
        contrasts: np.ndarray,
        differences: np.ndarray,
        believed: Believed,
        s: EstimatorSettings,
    ) -> None:
        """Sum contrasts up, and learn how noisy they are."""
        if not len(differences):
            return
        squares = contrasts * contrasts
        # Steps that follow each other in one cell carry no information about others, so they do not age it.
        size = squares.sum(axis=1)
        self.fade(exp(-float(np.minimum(size, 1.0).sum()) / s.memory))
        surprise = np.abs(differences - contrasts @ believed.theta[known])
        variance = squares @ believed.variance[known]
        limit = np.minimum(s.clip * np.sqrt(variance + self.noise), LARGEST)
        weighted = contrasts * (np.minimum(1.0, limit / np.maximum(surprise, 1e-9)) / self.noise)[:, None]
        self.information[known[:, None], known] += weighted.T @ contrasts
        self.moment[known] += weighted.T @ differences
        between = np.minimum(size, 1.0)
        kept = exp(-float(between.sum()) / SURPRISE_MEMORY)
        z2 = float(np.minimum(surprise**2 / (variance + self.noise), 9.0) @ between) / max(float(between.sum()), 1e-9)
        self.surprise = kept * self.surprise + (1.0 - kept) * z2
        square = np.minimum(surprise, limit) ** 2
        own = 1.28 * float(np.maximum(square - variance, 0.25 * square).mean())
        share = min(len(square) / LEVEL_MEMORY, 0.5)
        self.noise = min(max((1.0 - share) * self.noise + share * own, (s.noise / 5) ** 2), (5 * s.noise) ** 2)
        if believed.profiled is not None:
            error = np.minimum(np.abs(differences - contrasts @ believed.profiled[known]), LARGEST)
            self.fit = self.fit + (float(((error**2 - self.noise) * size).sum()), float((size * size).sum()))

    def gain(self, most: float) -> float:
        """Weight of the newest step in the mean that a step is compared with: that of the steady Kalman filter.

        The level is a random walk of variance q a step, plus noise of variance r. The squared mean distance of two
        steps of a cell, L steps apart, is proportional to r + q L / 2, and K^2 / (1 - K) = q / r.
        """
        if self.distances[1].min() < FAR:
            return most
        near, far = (self.distances[0] / self.distances[1]) ** 2
        wander = max(0.0, 2.0 * (far - near) / (FAR - NEAR))
        ratio = wander / max(near - NEAR * wander / 2, 1e-4)
        gain = (np.sqrt(ratio**2 + 4 * ratio) - ratio) / 2
        return float(np.clip(2.0 ** (round(2 * np.log2(gain + 1e-9)) / 2), LEAST_GAIN, most))

    def _add_distances(self, cells: np.ndarray, log_s: np.ndarray, num_new: int) -> None:
        self.distances *= exp(-num_new / LEVEL_MEMORY)
        for at, lag in enumerate((NEAR, FAR)):
            first = max(len(cells) - num_new, lag)
            before = slice(first - lag, max(len(cells) - lag, 0))
            apart = np.abs(log_s[first:] - log_s[before])[cells[first:] == cells[before]]
            self.distances[:, at] += float(apart.sum()), len(apart)

    def _follow_level(
        self, cells: np.ndarray, log_s: np.ndarray, theta: np.ndarray, settings: EstimatorSettings
    ) -> None:
        level = float(np.sort(self.log_s - theta[self.cells])[len(self.log_s) // 2])
        if abs(level - self.level) > OTHER_MACHINE:
            self.fade(0.0)
            self.sum_s *= 0.0
            self.count *= 0.0
            self.noise, self.surprise = settings.noise**2, 1.0
        self.level = level
        number, kept = np.bincount(cells, minlength=len(self.count)), exp(-len(cells) / (10.0 * LEVEL_MEMORY))
        self.count, self.sum_s = self.count * kept + number, self.sum_s * kept
        self.seen += number
        seconds = np.exp(np.minimum(log_s, level + theta[cells] + LARGEST))
        self.sum_s += np.bincount(cells, seconds, len(self.sum_s))


@lru_cache(256)
def _rows(num_new: int, num_all: int, gain: float) -> np.ndarray:
    """Contrast of each new step with those before it, [num_new, num_all]: 1 for itself, minus the weights of the mean."""
    lag = np.arange(num_all - num_new, num_all)[:, None] - np.arange(num_all)
    weights = np.where((lag > 0) & (lag <= TAIL), (1.0 - gain) ** np.maximum(lag - 1, 0), 0.0)
    total = weights.sum(axis=1, keepdims=True)
    rows: np.ndarray = (lag == 0) - weights / np.where(total > 0, total, 1.0)
    return rows


@dataclass(frozen=True, eq=False)
class Prior:
    """Prior of step times: of any machine, or with a profile.

    phi, precision: of the log weights, by the profile alone. residual: of a profiled cell, [lengths, sizes]; log_sizes:
    of its batch sizes; level: log seconds that it is relative to. sd: of its log times.
    """

    phi: Array
    precision: Array
    residual: Array
    log_sizes: Array
    level: float
    sd: float

    def residual_of(self, numbers: np.ndarray, grid: Grid) -> np.ndarray:
        """Residual of cells by the profile; arms with n-grams have none."""
        ranges, place = np.divmod(numbers, grid.num_arms)
        at, log_size = np.zeros(len(numbers)), np.log(grid.sizes[ranges])
        for length in range(min(len(self.residual), grid.num_lengths)):
            here = place == length
            if here.any():
                at[here] = np.interp(log_size[here], self.log_sizes, self.residual[length])
        return at

    def weight(self, fit: np.ndarray) -> float:
        """Share of its evidence that counts. fit: squared errors of contrasts beyond noise, and their amount.

        It falls with the third power of the ratio of variances: otherwise a profile that is wrong by a factor would
        prevent probes of arms that it disfavours.
        """
        error = (8.0 * self.sd**2 + max(float(fit[0]), 0.0)) / (8.0 + float(fit[1]))
        return min((self.sd**2 / error) ** 3, 1.0)


def prior_of(profile: Profile, settings: EstimatorSettings) -> Prior:
    """A profile as a prior: each cell is compared with the mean of all, weighted by its standard error."""
    values = [
        (
            c.batch_size,
            c.speculation_length,
            c.batch_size,
            c.batch_size * (c.speculation_length + 1),
            c.mean_context_length,
        )
        for c in profile.cells
    ]
    features = features_of(np.array(values, dtype=float).T)
    step_s = np.array([cell.step_s for cell in profile.cells])
    errors = np.array([cell.step_s_stderr for cell in profile.cells]) / step_s
    weight = 1.0 / (settings.profile_sd**2 + errors**2)
    information = np.diag(weight) - np.outer(weight, weight) / weight.sum()
    solution, log_s = COLD, np.log(step_s)
    for _ in range(3):
        solution = solve(
            information, information @ log_s, features, solution, None, np.zeros(len(log_s)), settings.residual
        )
    residual = log_s - shares(features, solution.phi)[0]
    level = float(np.average(residual, weights=weight))
    sizes = np.unique([cell.batch_size for cell in profile.cells])
    by_length = np.zeros((max(cell.speculation_length for cell in profile.cells) + 1, len(sizes)))
    for cell, value in zip(profile.cells, residual.tolist(), strict=True):
        by_length[cell.speculation_length, np.searchsorted(sizes, cell.batch_size)] = value - level
    precision = solution.precision - PRIOR_PRECISION
    return Prior(solution.phi, precision, by_length, np.log(sizes), level, settings.profile_sd)


@dataclass(frozen=True, eq=False)
class Solution:
    """Estimated step times, apart from the level.

    phi, precision: of the surface, by workers' evidence. rho: residual of each cell; shrinkage: (I + v M)^-1.
    """

    phi: Array
    precision: Array
    rho: Array
    shrinkage: Array


COLD = Solution(PRIOR_MEAN, PRIOR_PRECISION, np.zeros(0), np.zeros((0, 0)))  # before any step


@dataclass(eq=False)
class Believed:
    """Estimated theta of cells, its variance, and theta by the profile if there is one, [cells]."""

    theta: np.ndarray
    variance: np.ndarray
    profiled: np.ndarray | None = None


def solve(
    information: np.ndarray, moment: np.ndarray, features: np.ndarray, last: Solution, prior: tuple[np.ndarray, ...] | None,
    profiled: np.ndarray, residual: float,
) -> Solution:  # fmt: skip
    """The most probable surface and residuals, one step of Gauss-Newton from the last solution.

    prior: weighted precision of a profile, and its phi. profiled: residuals that the profile expects, [cells].
    """
    variance = residual**2
    shrinkage = np.linalg.inv(np.eye(len(moment)) + variance * information)
    log_mean, gradient = shares(features, last.phi)
    pull = shrinkage @ (moment - information @ (log_mean + profiled))
    shrunk = shrinkage @ gradient
    precision = gradient.T @ (gradient - shrunk) / variance + PRIOR_PRECISION
    force, total = gradient.T @ pull - PRIOR_PRECISION @ (last.phi - PRIOR_MEAN), precision
    if prior is not None:
        total = precision + prior[0]
        force = force - prior[0] @ (last.phi - prior[1])
    step = np.clip(np.linalg.solve(total, force), -1.0, 1.0)
    rho = profiled + variance * pull - (gradient - shrunk) @ step
    return Solution(last.phi + step, precision, rho, shrinkage)


def believed_of(features: np.ndarray, solution: Solution, residual: float, profiled: np.ndarray) -> Believed:
    """Estimates of all cells, including those added since the solution. profiled: residuals by a profile."""
    theta, gradient = shares(features, solution.phi)
    known, variance = len(solution.rho), np.full(len(features), residual**2)
    theta[:known] += solution.rho
    theta[known:] += profiled[known:]
    variance[:known] *= np.diag(solution.shrinkage)
    around = gradient - gradient.mean(axis=0)
    return Believed(theta, variance + ((around @ np.linalg.inv(solution.precision)) * around).sum(axis=1))
