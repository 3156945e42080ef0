"""The learned table of a context: what is believed of every arm, with its uncertainty and evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speclen.records import Arm, ArmEstimate

if TYPE_CHECKING:
    from speclen.controller.estimator.context import Context

Z_95 = 1.96


def ms_per_token(context: Context, name: str, at: int, arm: Arm) -> float | None:
    """Expected milliseconds per token of a sequence with an arm at a range of sizes; None while nothing is known."""
    estimates = context.groups[name].estimates
    if estimates is None or not context.is_known:
        return None
    place = (at, int(arm.ngram), arm.speculation_length)
    return 1000.0 * estimates.step_s(*place) / float(np.exp(estimates.log_tokens[place]))


def rows_of(context: Context) -> list[ArmEstimate]:
    """Rows by range of batch sizes and arm."""
    group, grid = context.groups[""], context.grid
    estimates = group.estimates
    if estimates is None or not context.is_known:
        return []
    # How far step times wander, over the samples that the level is averaged over.
    level_variance = context.workers.noise() ** 2 / max(min(context.num_reports, 300.0) / 10.0, 1.0)
    variance = estimates.variance(np.arange(len(grid.low)), group.selection.arms) + level_variance
    spread = np.exp(np.minimum(Z_95 * np.sqrt(variance), 5.0))
    count, log_sum = context.samples()
    # Samples are put down to the work of their cell's first step: with n-grams, that may be far from the expected one.
    first = estimates.log_time.copy()
    if len(context.cells.numbers):
        first.reshape(-1)[context.cells.numbers] = estimates.of_cells(context.cells)[0]
    observed = log_sum / np.maximum(count, 1.0) + estimates.log_time - first
    rows = []
    for at, (low, high) in enumerate(zip(grid.low.tolist(), grid.high.tolist(), strict=True)):
        for arm in context.limits.arms():
            place = (at, int(arm.ngram), arm.speculation_length)
            tokens, step_s = float(np.exp(estimates.log_tokens[place])), estimates.step_s(*place)
            ms, factor = 1000.0 * step_s / tokens, float(spread[place])
            seen, profiled = bool(count[place] >= 1), bool(context.profiled[at]) and not arm.ngram
            source = ("both" if profiled else "online") if seen else ("profile" if profiled else "prior")
            rows.append(
                ArmEstimate(
                    *(low, high, arm, tokens, step_s, ms, ms / factor, ms * factor, round(float(count[place]))),
                    observed_step_s=float(np.exp(observed[place])) if seen else None,
                    source=source,
                    is_best=int(group.selection.arms[at]) == grid.place(arm),
                )
            )
    return rows
