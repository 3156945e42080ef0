"""How well step times were told: every report beside what was believed before it was learned from.

A machine's speed of the moment changes all lengths alike and has no say in the choice, so what counts is how the time of one
cell (batch sizes of a bucket x length) compares with the times beside it: errors are of ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.core import ContextKey, StepObservation

# Reports over which a worker's speed of the moment is averaged.
LEVEL_REPORTS = 16.0

Sender = tuple[ContextKey, str]  # a worker, in a context


@dataclass(slots=True)
class Accuracy:
    """Errors of ratios of step times, in log, one for each group of reports that a worker sent of one cell.

    first: of cells of which nothing had been reported before; later: of the others.
    """

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    _level: dict[Sender, float] = field(default_factory=dict)  # mean log error of the newest reports
    _seen: set[tuple[Sender, int]] = field(default_factory=set)

    def add(self, context: Context, observations: Sequence[StepObservation], workers: Sequence[str]) -> None:
        """Compare reports with what the context believes; to be called before it learns from them."""
        errors: dict[tuple[Sender, int], list[float]] = {}
        for worker, step in zip(workers, observations, strict=True):
            times = context.group_of(worker).times
            if step.teaches_latency and times.known:
                cell = int(times.bucket_of[step.batch_size]) * times.num_lengths + step.speculation_length
                context_moved = step.mean_context_length - float(times.drawn_context[cell])
                told = float(times.log_seconds[cell]) + math.log1p(max(context_moved * times.per_context[cell], -0.9))
                errors.setdefault(((context.key, worker), cell), []).append(math.log(step.latency_s) - told)
        for (sender, cell), values in errors.items():
            self._judge(sender, cell, float(np.mean(values)), len(values))

    def _judge(self, sender: Sender, cell: int, error: float, num_reports: int) -> None:
        level = self._level.setdefault(sender, error)
        (self.later if (sender, cell) in self._seen else self.first).append(error - level)
        self._seen.add((sender, cell))
        self._level[sender] = level - math.expm1(-num_reports / LEVEL_REPORTS) * (error - level)


@dataclass(frozen=True, slots=True)
class Spread:
    """How far errors go: their number, the median of their size and its 90th percentile, in percent."""

    num: int
    median_percent: float
    p90_percent: float


def spread(errors: Sequence[float]) -> Spread | None:
    """None without any errors."""
    if not errors:
        return None
    median, most = 100.0 * np.quantile(np.abs(errors), [0.5, 0.9])
    return Spread(len(errors), float(median), float(most))
