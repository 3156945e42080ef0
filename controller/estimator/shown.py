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
    shape = estimates.log_time.shape
    count, log_sum = (values.reshape(shape) for values in context.samples())
    variance = estimates.variance(group.selection.arms) + context.level_variance()
    rows = []
    for at in range(len(context.grid.ranges.low)):
        for arm in context.limits.arms():
            place = (at, int(arm.ngram), arm.speculation_length)
            rows.append(_row(context, place, arm, float(variance[place]), float(count[place]), float(log_sum[place])))
    return rows


def _row(
    context: Context, place: tuple[int, int, int], arm: Arm, variance: float, count: float, log_sum: float
) -> ArmEstimate:
    """place: range, n-grams or not, length; count, log_sum: of samples."""
    group, ranges, at = context.groups[""], context.grid.ranges, place[0]
    estimates = group.estimates
    assert estimates is not None
    tokens = float(np.exp(estimates.log_tokens[place]))
    step_s = float(min(np.exp(estimates.log_time[place] + estimates.level), MOST_S))
    spread = min(Z_95 * float(np.sqrt(variance)), 5.0)
    ms = 1000 * step_s / tokens
    profiled = bool(context.profiled[at]) and not arm.ngram
    source = ("both" if profiled else "online") if count >= 1 else ("profile" if profiled else "prior")
    return ArmEstimate(
        *(int(ranges.low[at]), int(ranges.high[at]), arm, tokens, step_s),
        *(ms, ms * float(np.exp(-spread)), ms * float(np.exp(spread)), round(count)),
        observed_step_s=float(np.exp(log_sum / count)) if count >= 1 else None,
        source=source,
        is_best=context.arm(int(group.selection.arms[at])) == arm,
    )
