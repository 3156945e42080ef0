"""Estimates of every arm at every batch range, the arms in use, and which arm a probe tries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.grid import Array, Cells, Grid, features_of, moved, shares
from speclen.controller.estimator.settings import EstimatorSettings
from speclen.controller.estimator.step_time import Solution
from speclen.controller.estimator.tokens import Ratios, log_variance


class Load(NamedTuple):
    """Traffic of a context.

    mix: share of each class in the generated tokens, [ranges, classes]; context: tokens held per sequence, [ranges];
    prefill_s: draft-model prefill per generated token; waiting: new sequences per generated token; level: log of
    the step time in seconds at log_time 0, which puts prefill_s on the scale of step times.
    """

    mix: Array
    context: Array
    prefill_s: float
    waiting: float
    level: float


class Estimates:
    """Estimates of every cell, [ranges, arms].

    log_time: log step time without the level. log_tokens: of a sequence in a step. score: log tokens per second, with
    prefill and waiting. cells, solution, ratios, load: the inputs. profiled: a profile's residuals of log step times,
    for cells without samples.
    """

    def __init__(
        self, grid: Grid, cells: Cells, solution: Solution, ratios: Ratios, load: Load, profiled: np.ndarray
    ) -> None:
        self.grid, self.solution, self.ratios, self.load = grid, solution, ratios, load
        self._numbers, self._features = cells.numbers[: len(solution.rho)], cells.features[: len(solution.rho)]
        per_token = np.stack([np.ones(ratios.expected.shape), ratios.drafted, ratios.verified]) / ratios.expected
        steps, drafted, verified = np.tensordot(load.mix, per_token, (1, 1)).transpose(1, 0, 2, 3)
        drafted, verified = np.minimum(drafted / steps, 1.0), verified / steps
        passes = grid.lengths * (1.0 - (1.0 - drafted) ** grid.batch)
        columns = grid.batch, passes, grid.batch * drafted, grid.batch * verified, load.context[:, None, None]
        features = features_of(np.stack([np.broadcast_to(each, grid.shape).ravel() for each in columns]))
        log_time = np.log(features @ np.exp(solution.phi)).reshape(len(grid.low), -1)
        self._expected = features.reshape(*log_time.shape, -1)
        log_time += profiled
        log_time.reshape(-1)[self._numbers] += solution.rho - profiled.reshape(-1)[self._numbers]
        steps = np.minimum(steps, 1.0).reshape(log_time.shape)  # a mean of classes may round to a little more
        self.log_time, self.log_tokens = log_time, -np.log(steps)
        self.score = -np.log(steps + load.waiting) - log_time
        if load.prefill_s > 0:
            drafts = np.broadcast_to((grid.lengths > 0) * grid.batch, grid.shape).reshape(log_time.shape)
            extra = load.prefill_s * drafts / steps
            self.score -= np.log1p(extra * np.exp(-log_time - load.level))

    def variance(self, at: int, base: int, settings: EstimatorSettings) -> np.ndarray:
        """Variance of each arm's score minus that of the arm `base`, at the range `at`, by workers' samples, [arms]."""
        grid, solution = self.grid, self.solution
        _, gradient = shares(self._expected[at], solution.phi)
        own, places = np.full(grid.num_arms, -1), self._numbers - at * grid.num_arms
        here = np.flatnonzero((places >= 0) & (places < grid.num_arms))
        own[places[here]] = here
        _, of_cells = shares(self._features, solution.phi)
        gradient[places[here]] += (solution.shrinkage[here] @ of_cells) - of_cells[here]
        difference = gradient - gradient[base]
        surface = ((difference @ np.linalg.inv(solution.precision)) * difference).sum(axis=1)
        variance = np.append(np.diag(solution.shrinkage), 1.0) * settings.residual**2  # the last: without evidence
        shared = np.zeros(grid.num_arms)
        if own[base] >= 0:
            shared = np.where(own >= 0, solution.shrinkage[own[base], own], 0.0) * settings.residual**2
        residual = np.maximum(variance[own] + variance[own[base]] - 2.0 * shared, 0.0)
        total: np.ndarray = surface + residual + log_variance(self.ratios, base, settings)
        return total


@dataclass(eq=False)
class Selection:
    """Arms in use of one group of workers. arms: places by range; version: of the table."""

    arms: Array
    version: int = 1

    @classmethod
    def cold(cls, grid: Grid, settings: EstimatorSettings) -> Selection:
        """Before anything was seen."""
        return cls(np.full(len(grid.low), min(settings.cold_length, grid.num_lengths - 1)))

    def widened(self, old: Grid, new: Grid) -> Selection:
        """The same in a wider grid: new sizes begin with the arm of the largest known one."""
        known = moved(self.arms, old, new)
        return replace(
            self, arms=np.append(known, np.full(len(new.low) - len(known), known[-1])), version=self.version + 1
        )

    def choose(self, estimates: Estimates, known: np.ndarray, settings: EstimatorSettings) -> list[int]:
        """Select again; returns the ranges whose arm changed.

        known: ranges that were seen or profiled. The others draft at most as much as the nearest known one.
        """
        if not known.any():
            return []
        grid, before = estimates.grid, self.arms
        value = np.where(grid.allowed, estimates.score, -np.inf)
        after = _best(value, before, settings.hysteresis)
        if not known.all():
            places, unknown = np.flatnonzero(known), np.flatnonzero(~known)
            log_sizes = np.log(grid.sizes)
            nearest = places[np.abs(log_sizes[unknown, None] - log_sizes[places]).argmin(axis=1)]
            longest = after[nearest] % grid.num_lengths
            fits = np.arange(grid.num_arms) % grid.num_lengths <= longest[:, None]
            after[unknown] = _best(np.where(fits, value[unknown], -np.inf), before[unknown], settings.hysteresis)
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
        in_use = self.arms[at]
        value = estimates.score[at] - estimates.score[at, in_use]
        hope = settings.optimism * np.sqrt(estimates.variance(at, in_use, settings))
        optimistic = np.where(allowed, value + hope, -np.inf)
        optimistic[in_use] = -np.inf
        place = int(optimistic.argmax())
        if not optimistic[place] > -np.inf:
            return None
        longer = float(np.exp(min(estimates.log_time[at, place] - estimates.log_time[at, in_use], 5.0)))
        return place, max(longer * (1.0 - float(np.exp(min(optimistic[place], 0.0)))), settings.least_cost)


def _best(value: np.ndarray, before: np.ndarray, hysteresis: float) -> np.ndarray:
    """Place of the best arm of each row; the one before stays unless another is better by the hysteresis."""
    rows, best = np.arange(len(value)), value.argmax(axis=1)
    return np.where(value[rows, best] <= value[rows, before] + hysteresis, before, best)
