"""The learned table of a context: what is believed of every arm, with its uncertainty and evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from speclen.records import Arm, ArmEstimate

if TYPE_CHECKING:
    from speclen.controller.estimator.context import Context

Z_95 = 1.96
MOST_S = 1e5  # of a step that is shown


def ms_per_token(context: Context, name: str, at: int, arm: Arm) -> float | None:
    """Expected milliseconds per token of a sequence with an arm at a range of sizes; None while nothing is known."""
    group = context.groups[name]
    if group.estimates is None or not (context.num_reports or context.profiled.any()):
        return None
    place = (at, int(arm.ngram), arm.speculation_length)
    log_s = group.estimates.log_time[place] + group.estimates.level - group.estimates.log_tokens[place]
    return float(min(1000.0 * np.exp(log_s), 1000.0 * MOST_S))


def estimates_of(context: Context) -> list[ArmEstimate]:
    """Rows by range of batch sizes and arm; ranges side by side with the same arm in use and residuals are one."""
    group = context.groups[""]
    estimates = group.estimates
    if estimates is None or not (context.num_reports or context.profiled.any()):
        return []
    samples, log_sum = context.samples()
    variance = estimates.variance(group.selection.arms) + context.level_variance()
    rows = []
    for at in range(len(context.grid.choices.low)):
        for arm in context.limits.arms():
            rows.append(_row(context, at, arm, variance[at], samples, log_sum))
    return rows


def _row(
    context: Context, at: int, arm: Arm, variance: np.ndarray, samples: np.ndarray, log_sum: np.ndarray
) -> ArmEstimate:
    group = context.groups[""]
    estimates = group.estimates
    assert estimates is not None
    place = (int(arm.ngram), arm.speculation_length)
    tokens = float(np.exp(estimates.log_tokens[at][place]))
    step_s = float(min(np.exp(estimates.log_time[at][place] + estimates.level), MOST_S))
    spread = Z_95 * float(np.sqrt(variance[place]))
    low, high = step_s / tokens * np.exp(-min(spread, 5.0)), step_s / tokens * np.exp(min(spread, 5.0))
    size = int(context.sizes[at])
    cell = int(context.grid.cells_at(np.array([size]), np.array([place[0]]), np.array([place[1]]))[0])
    count = float(samples[cell])
    profiled = bool(context.profiled[at]) and not arm.ngram
    source = ("both" if profiled else "online") if count >= 1 else ("profile" if profiled else "prior")
    return ArmEstimate(
        *(int(context.grid.choices.low[at]), int(context.grid.choices.high[at]), arm, tokens, step_s),
        *(1000 * step_s / tokens, 1000 * float(low), 1000 * float(high), round(count)),
        observed_step_s=float(np.exp(log_sum[cell] / count)) if count >= 1 else None,
        source=source,
        is_best=context.arm(int(group.selection.arms[at])) == arm,
    )
