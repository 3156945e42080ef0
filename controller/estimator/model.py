"""Estimates for every arm at every range of batch sizes, from evidence of step times and of tokens per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.features import features_of, shares
from speclen.controller.estimator.load import Load
from speclen.controller.estimator.saving import Array
from speclen.controller.estimator.sizes import Cells, Grid
from speclen.controller.estimator.step_time import Evidence, Solution, solve
from speclen.controller.estimator.tokens import Ratios, contrast_variance


@dataclass(frozen=True, eq=False)
class Estimates:
    """Believed values of every cell, [ranges, 2, lengths].

    log_time: log step time without the level. log_tokens: of a sequence in a step. score: log tokens per second, with
    prefill and waiting. gradient: of log_time by phi, residuals considered, [..., NUM_FEATURES]. place: of the cell among
    those with evidence, -1 without any. level: log seconds that log_time is relative to, [ranges].
    """

    log_time: Array
    log_tokens: Array
    score: Array
    solution: Solution
    ratios: Ratios
    gradient: Array
    place: Array
    level: Array

    def step_s(self, at: int, ngram: int, length: int) -> float:
        """Seconds of a step. at: range of sizes."""
        return float(np.exp(self.log_time[at, ngram, length] + self.level[at]))

    def variance(self, at: np.ndarray, base: np.ndarray, by_steps: bool = False) -> np.ndarray:
        """Variance of the score of every arm relative to another one, [n, 2, lengths].

        at: ranges of sizes; base: places of the arms that they are compared with; [n] each. by_steps: only what steps of an
        arm can tell, without what evaluated outputs alone do.
        """
        num_lengths = self.place.shape[2]
        ngram, length = np.divmod(base, num_lengths)
        difference = self.gradient[at] - self.gradient[at, ngram, length][:, None, None]
        surface = ((difference @ self.solution.covariance) * difference).sum(axis=-1)
        tokens = contrast_variance(self.ratios, ngram, length, by_steps)
        variance: np.ndarray = surface + self._residual_variance(self.place[at], self.place[at, ngram, length]) + tokens
        return variance

    def _residual_variance(self, place: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Of rho of cells relative to that of others. place: [n, 2, lengths], base: [n]."""
        residual, known = self.solution.residual, len(self.solution.shrinkage)
        covariance = np.zeros((known + 1, known + 1))  # the last: cells without evidence
        covariance[:-1, :-1] = residual * self.solution.shrinkage
        covariance[-1, -1] = residual
        own, base = np.diag(covariance), base[:, None, None]
        shared = np.where((place < 0) & (base < 0), 0.0, covariance[place, base])
        return np.maximum(own[place] + own[base] - 2 * shared, 0.0)

    def of_cells(self, cells: Cells) -> tuple[np.ndarray, np.ndarray]:
        """Log time of every cell with evidence, and the variance of that around their mean, [cells]."""
        theta, gradient = shares(cells.features, self.solution.phi)
        gradient = gradient - gradient.mean(axis=0)
        known = len(self.solution.rho)  # cells that came later have no residual yet
        variance = np.full(len(theta), self.solution.residual)
        theta[:known] += self.solution.rho
        variance[:known] *= np.diag(self.solution.shrinkage)
        return theta, variance + ((gradient @ self.solution.covariance) * gradient).sum(axis=1)


def solve_all(cells: Cells, evidence: Sequence[Evidence], weights: Sequence[float], last: Solution) -> Solution:
    """The most probable step times by the evidence of some workers, each with its weight. last: to begin with."""
    num_cells = len(cells.numbers)
    information, moment = np.zeros((num_cells, num_cells)), np.zeros(num_cells)
    for each, weight in zip(evidence, weights, strict=True):
        each.grow(num_cells)
        information += weight * each.information
        moment += weight * each.moment
    return solve((information + information.T) / 2, moment, cells.features, last)


def estimates_of(
    grid: Grid,
    cells: Cells,
    evidence: Sequence[Evidence],
    solution: Solution,
    ratios: Ratios,
    load: Load,
    level: float,
) -> Estimates:
    """Step times and tokens of every arm at every range of sizes. solution: by this evidence; level: of all sizes."""
    values = (ratios.steps, ratios.drafted, ratios.verified)
    steps, drafted, verified = (np.einsum("rc,cnl->rnl", load.mix, each) for each in values)
    drafted, verified = np.minimum(drafted / steps, 1.0), verified / steps  # of a sequence in a step
    batch = np.broadcast_to(grid.sizes[:, None, None].astype(float), grid.shape)
    lengths = np.broadcast_to(np.arange(grid.num_lengths, dtype=float), grid.shape)
    context = np.broadcast_to(load.context[:, None, None], grid.shape)
    passes = lengths * (1.0 - (1.0 - drafted) ** batch)
    columns = (batch, passes, batch * drafted, batch * verified, context)
    log_time, gradient = shares(features_of(*(each.reshape(-1) for each in columns)), solution.phi)
    # A cell with evidence has a residual, which changes with phi, too.
    theta, cell_gradient = shares(cells.features, solution.phi)
    residual_gradient = solution.reach - cell_gradient
    log_time[cells.numbers] += solution.rho
    gradient[cells.numbers] += residual_gradient
    place = np.full(len(log_time), -1)
    place[cells.numbers] = np.arange(len(cells.numbers))
    log_time, gradient, place = (
        log_time.reshape(grid.shape),
        gradient.reshape(*grid.shape, -1),
        place.reshape(grid.shape),
    )
    prefill_s = np.where(lengths > 0, load.prefill_s * batch / steps, 0.0)
    levels = _levels(grid, cells, theta + solution.rho, evidence, level)
    score = -np.log(steps + load.waiting) - np.log(np.exp(log_time + levels[:, None, None]) + prefill_s)
    return Estimates(log_time, -np.log(steps), score, solution, ratios, gradient, place, levels)


def _levels(grid: Grid, cells: Cells, theta: np.ndarray, evidence: Sequence[Evidence], level: float) -> np.ndarray:
    """Log seconds by range of sizes: what its own samples took, as far as it has any, [ranges].

    theta: log time of each cell. level: of all sizes. Ranges without samples are between their neighbours that have some.
    Contrasts tell one size from another only where the load changes; choices need no more, figures of a size do.
    """
    ranges, (count, log_sum) = cells.numbers // (2 * grid.num_lengths), np.zeros((2, len(grid.low)))
    for each in evidence:
        count += np.bincount(ranges, each.count, len(count))
        log_sum += np.bincount(ranges, each.log_sum - each.count * theta, len(count))
    around, known, log_sizes = np.full(len(count), level), count >= settings.current.shrinkage, np.log(grid.sizes)
    if known.any():
        around = np.interp(log_sizes, log_sizes[known], log_sum[known] / count[known])
    levels: np.ndarray = (log_sum + settings.current.shrinkage * around) / (count + settings.current.shrinkage)
    return levels
