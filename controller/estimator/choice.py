"""Estimates of every arm at every batch range, the arms in use, and which arm a probe tries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator.grid import Array, Cells, Grid, features_of, shares
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.controller.estimator.step_time import Solution
from speclen.controller.estimator.tokens import Ratios, log_variance
from speclen.controller.estimator.traffic import Load


class Estimates:
    """Estimates of every cell, [ranges, arms].

    log_time: log step time without the level. log_tokens: of a sequence in a step. score: log tokens per second, with
    prefill and waiting. grid, solution, ratios, load: the inputs.
    """

    def __init__(self, grid: Grid, cells: Cells, solution: Solution, ratios: Ratios, load: Load) -> None:
        self.grid, self.solution, self.ratios, self.load = grid, solution, ratios, load
        number, sizes = len(solution.rho), grid.sizes[:, None].astype(float)
        self._cell_features = cells.features[:number]
        self._ranges, self._places = cells.ranges[:number], cells.places[:number]
        steps = np.minimum(load.mix @ (1.0 / ratios.expected).reshape(len(load.mix.T), -1), 1.0)  # a mean may round up
        drafted, verified = ratios.drafted.reshape(-1), ratios.verified.reshape(-1)
        passes = grid.lengths * (1.0 - (1.0 - drafted) ** sizes)
        columns = np.broadcast_arrays(sizes, passes, sizes * drafted, sizes * verified, load.context[:, None])
        features = features_of(np.stack(columns).reshape(5, -1))
        log_time = np.log(features @ np.exp(solution.phi)).reshape(grid.shape)
        self._features = features.reshape(*grid.shape, -1)
        log_time[self._ranges, self._places] += solution.rho
        self.log_time, self.log_tokens = log_time, -np.log(steps)
        self.score = -np.log(steps + load.waiting) - log_time
        if load.prefill_s > 0:
            extra = load.prefill_s * sizes * (grid.lengths > 0) / steps
            self.score -= np.log1p(extra * np.exp(-log_time - load.level))

    def variance(self, at: int, base: int, settings: EstimatorSettings) -> np.ndarray:
        """Variance of each arm's score minus that of the arm `base`, at the range `at`, by workers' samples, [arms]."""
        solution, prior = self.solution, settings.residual**2
        _, gradient = shares(self._features[at], solution.phi)
        own = np.flatnonzero(self._ranges == at)  # cells of this range
        places, left = self._places[own], np.diag(solution.shrinkage)[own]
        residual, shared = np.full(len(gradient), prior), np.zeros(len(gradient))
        residual[places] = prior * left
        of_cells = shares(self._cell_features, solution.phi)[1]
        gradient[places] += solution.shrinkage[own] @ of_cells - of_cells[own]
        if base in places:
            [cell] = own[places == base]
            shared[places] = prior * solution.shrinkage[cell, own]
        difference = gradient - gradient[base]
        surface = ((difference @ solution.covariance) * difference).sum(axis=1)
        total: np.ndarray = surface + np.maximum(residual + residual[base] - 2.0 * shared, 0.0)
        return total + log_variance(self.ratios, base, settings)


@dataclass(eq=False)
class Selection:
    """Arms in use of one group of workers. arms: places by range; version: of the table."""

    arms: Array
    version: int = 1

    def widen(self, num_ranges: int) -> None:
        """Let larger batch sizes begin with the arm of the largest known one."""
        self.arms = np.pad(self.arms, (0, num_ranges - len(self.arms)), mode="edge")
        self.version += 1

    def choose(self, estimates: Estimates, settings: EstimatorSettings) -> list[int]:
        """Select again; returns the ranges whose arm changed. The arm in use stays unless another is clearly better."""
        value, before = np.where(estimates.grid.allowed, estimates.score, -np.inf), self.arms
        rows, best = np.arange(len(value)), value.argmax(axis=1)
        after = np.where(value[rows, best] <= value[rows, before] + settings.hysteresis, before, best)
        changed = np.flatnonzero(after != before)
        if len(changed):
            self.arms, self.version = after, self.version + 1
        return [int(at) for at in changed]

    def probe(
        self, at: int, estimates: Estimates, allowed: np.ndarray, settings: EstimatorSettings
    ) -> tuple[int, float] | None:
        """The arm to try at a range, and an optimistic estimate of the loss per step, in steps of the arm in use.

        allowed: arms that may be tried, [arms].
        """
        in_use = int(self.arms[at])
        value = estimates.score[at] - estimates.score[at, in_use]
        optimistic = value + settings.optimism * np.sqrt(estimates.variance(at, in_use, settings))
        optimistic[~allowed] = optimistic[in_use] = -np.inf
        place = int(optimistic.argmax())
        if not optimistic[place] > -np.inf:
            return None
        longer = float(np.exp(min(estimates.log_time[at, place] - estimates.log_time[at, in_use], 5.0)))
        return place, max(longer * (1.0 - float(np.exp(min(optimistic[place], 0.0)))), settings.least_cost)
