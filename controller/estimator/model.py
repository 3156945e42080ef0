"""Estimates for every arm at every range of batch sizes, from evidence of step times and of tokens per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.features import Prior, features_of, shares
from speclen.controller.estimator.load import Load
from speclen.controller.estimator.sizes import Cells, Ranges
from speclen.controller.estimator.step_time import Evidence, Solution, solve
from speclen.controller.estimator.tokens import Ratios, contrast_variance

Array = np.ndarray


class Grid(NamedTuple):
    """The cells of a context: (range of batch sizes, n-grams or not, length).

    num_lengths: 0 to the largest. slopes: of the surface.
    """

    ranges: Ranges
    num_lengths: int
    slopes: int

    @property
    def sizes(self) -> Array:
        """A batch size of each range."""
        return (self.ranges.low + self.ranges.high) // 2

    @property
    def num_cells(self) -> int:
        """Of all ranges and arms, with evidence or without."""
        return len(self.ranges.low) * 2 * self.num_lengths

    def cells_at(self, batch: Array, ngram: Array, length: Array) -> Array:
        """Number of the cell of each step, [n]."""
        cells: Array = (self.ranges.of[batch] * 2 + ngram) * self.num_lengths + length
        return cells


class Estimates(NamedTuple):
    """Believed values, all [ranges, 2, lengths]: log step time without the level, log tokens per sequence and step,
    log tokens per second (with prefill and waiting), and whether an arm is allowed. phi and the rest for uncertainties."""

    log_time: Array
    log_tokens: Array
    score: Array
    solution: Solution
    ratios: Ratios
    gradient: Array  # of log_time by phi, [ranges, 2, lengths, p], residuals considered
    place: Array  # of the cell among those with evidence, -1 without any
    level: float
    load: Load

    def variance(self, base: Array) -> Array:
        """Variance of the score of every arm relative to the arm in use, [ranges, 2, lengths]. base: places, [ranges]."""
        at = np.arange(len(base))
        ngram, length = np.divmod(base, self.place.shape[2])
        difference = self.gradient - self.gradient[at, ngram, length][:, None, None]
        surface = ((difference @ self.solution.covariance) * difference).sum(axis=-1)
        tokens = contrast_variance(self.ratios, ngram, length)[..., : self.place.shape[2]]
        return surface + self._residual_variance(self.place[at, ngram, length]) + tokens

    def believed(self, cells: Cells, offset: Array) -> tuple[Array, Array]:
        """Log time of every cell, and the variance of that around their mean, [cells]."""
        log_mean, gradient = shares(cells.features, self.solution.phi)
        gradient = gradient - gradient.mean(axis=0)
        theta, known = log_mean + offset[cells.numbers], len(self.solution.rho)
        variance = np.full(len(theta), self.solution.residual)
        if known <= len(theta):
            theta[:known] += self.solution.rho
            variance[:known] *= np.diag(self.solution.shrinkage)
        return theta, variance + ((gradient @ self.solution.covariance) * gradient).sum(axis=1)

    def _residual_variance(self, here: Array) -> Array:
        """Of rho relative to that of the cell in use. here: its place among those with evidence, -1 without."""
        residual, shrinkage = self.solution.residual, self.solution.shrinkage
        padded = np.zeros((len(shrinkage) + 1, len(shrinkage) + 1))  # the last: cells without evidence
        padded[:-1, :-1] = residual * shrinkage
        padded[-1, -1] = residual
        own = np.diag(padded)
        here = here[:, None, None]
        unseen = (self.place < 0) & (here < 0)
        shared = np.where(unseen, 0.0, padded[self.place, here])
        variance = own[self.place] + own[here] - 2 * shared
        return np.maximum(variance, 0.0)


def estimate(
    grid: Grid,
    cells: Cells,
    evidence: Sequence[Evidence],
    weights: Sequence[float],
    ratios: Ratios,
    prior: Prior,
    load: Load,
    last: Solution | None,
    offset: Array,
    level: float,
) -> Estimates:
    """Solve for step times and put them together with tokens. offset: prior residual of each cell number, [cells]."""
    num_cells = len(cells.numbers)
    information, moment = np.zeros((num_cells, num_cells)), np.zeros(num_cells)
    for each, weight in zip(evidence, weights, strict=True):
        each.grow(num_cells)
        information += weight * each.information
        moment += weight * each.moment
    information = (information + information.T) / 2
    moment = moment - information @ offset[cells.numbers] if num_cells else moment
    phi, residual = (prior.mean, 0.04**2) if last is None else (last.phi, last.residual)
    solution = solve(information, moment, cells.features, prior, phi, residual)
    return spread(grid, cells, solution, ratios, load, offset, level)


def spread(
    grid: Grid, cells: Cells, solution: Solution, ratios: Ratios, load: Load, offset: Array, level: float
) -> Estimates:
    """Estimates of every arm at every range of sizes from a solution for step times."""
    seen = len(solution.rho)  # cells that came later have no residual yet
    numbers_seen, features_seen = cells.numbers[:seen], cells.features[:seen]
    shape = (len(grid.sizes), 2, grid.num_lengths)
    batch = np.broadcast_to(grid.sizes[:, None, None].astype(float), shape)
    lengths = np.broadcast_to(np.arange(grid.num_lengths, dtype=float), shape)
    here = slice(grid.num_lengths)  # other contexts of the pair may have longer lengths
    values = (ratios.steps, ratios.drafted, ratios.verified)
    per_token = [np.einsum("rc,cnl->rnl", load.mix, each[..., here]) for each in values]
    steps, drafted, verified = per_token[0], np.minimum(per_token[1] / per_token[0], 1.0), per_token[2] / per_token[0]
    passes = lengths * (1.0 - (1.0 - drafted) ** batch)
    context = np.broadcast_to(load.context[:, None, None], shape)
    columns = [values.reshape(-1) for values in (batch, passes, batch * drafted, batch * verified, context)]
    features = features_of(columns, grid.slopes)
    log_mean, gradient = shares(features, solution.phi)
    at = np.full(grid.num_cells, -1)
    at[numbers_seen] = np.arange(seen)
    log_time = log_mean + offset
    if seen:
        log_time = log_time + np.where(at >= 0, solution.rho[at], 0.0)
        gradient = np.where(
            at[:, None] >= 0, gradient + (solution.reach - shares(features_seen, solution.phi)[1])[at], gradient
        )
    log_time = log_time.reshape(shape)
    seconds = np.exp(log_time + level) + np.where(lengths > 0, load.prefill_s * batch / steps, 0.0)
    score = -np.log(steps + load.waiting) - np.log(seconds)
    return Estimates(
        log_time, -np.log(steps), score, solution, ratios, gradient.reshape(*shape, -1), at.reshape(shape), level, load
    )


class Saved:
    """The part of estimates that is saved; the rest follows from it."""

    STATE = (*Solution._fields, *Ratios._fields, *Load._fields, "level")

    def __init__(self, estimates: Estimates | None = None) -> None:
        if estimates is None:
            numbers = ("residual", "outputs", "prefill_s", "waiting", "level")
            self.__dict__.update({name: 0.0 if name in numbers else np.zeros(0) for name in self.STATE})
            return
        parts = (estimates.solution, estimates.ratios, estimates.load)
        self.__dict__.update({name: value for part in parts for name, value in part._asdict().items()})
        self.level = estimates.level

    def spread(self, grid: Grid, cells: Cells, offset: Array) -> Estimates:
        """The estimates."""
        values = self.__dict__
        solution = Solution(*(values[name] for name in Solution._fields))
        ratios = Ratios(*(values[name] for name in Ratios._fields))
        load = Load(*(values[name] for name in Load._fields))
        return spread(grid, cells, solution, ratios, load, offset, values["level"])
