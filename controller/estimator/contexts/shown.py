"""What people see of a context: every cell with what is believed of it, beside what was seen."""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.core import Bucket, LearnedRow, LengthEstimate
from speclen.controller.estimator.plans.choice import ShownPlan
from speclen.controller.estimator.times.step_time import StepTimes

# Reports of a cell from which the interval holds their mean.
SHOWN_REPORTS = 5
# Of an interval, in log time: a factor of 400 says that nothing is known.
LARGEST_SPREAD = 6.0


def learned_rows(context: Context, group: Group) -> list[LearnedRow]:
    """Every bucket and length with what is believed, what was seen, and on how much evidence; empty while unknown."""
    times, num_lengths = group.times, context.limits.max_speculation_length + 1
    if not times.known:
        return []
    tokens, bounds, seconds = context.tokens(group).reshape(-1), interval(times), group.choice.seconds.reshape(-1)
    kind = context.mix.argmax(axis=1).tolist()
    unsure = np.array([group.acceptance.log_tokens_variance(kind[band], band) for band in range(len(kind))])
    # The pair's acceptance may have longer lengths than this context.
    spread = np.exp(1.96 * np.sqrt(unsure))[context.bands, :num_lengths].reshape(-1)
    bare = group.choice.step_s.reshape(-1)
    borne = 1e3 / tokens * (seconds / bare)
    low, high = bounds[0] * borne / spread, bounds[1] * borne * spread
    rows = []
    for cell in range(times.num_cells):
        at, length = divmod(cell, num_lengths)
        ms = float(seconds[cell] * 1e3 / tokens[cell]), float(low[cell]), float(high[cell])
        estimate = LengthEstimate(length, float(tokens[cell]), float(seconds[cell]), *ms, float(bare[cell]))
        seen = int(times.num_seen[cell])
        observed = float(times.total_s[cell] / times.num_seen[cell]) if seen else None
        since = int(times.clock - times.seen_at[cell]) if seen else None
        best = length == group.lengths[at]
        rows.append(LearnedRow(context.buckets[at], estimate, seen, source(times, cell), best, observed, since))
    return rows


def interval(times: StepTimes) -> tuple[FloatArray, FloatArray]:
    """Bounds of each cell's mean step time, 95%, that hold what was seen where enough was."""
    wandering = max((speed.sd for speed in times.watch.speeds.values()), default=0.0)
    spread = np.exp(np.minimum(1.96 * np.sqrt(times.variance + wandering**2), LARGEST_SPREAD))
    seconds, seen_s = times.seconds().reshape(-1), times.total_s / np.maximum(times.num_seen, 1.0)
    low, high, seen = seconds / spread, seconds * spread, times.num_seen >= SHOWN_REPORTS
    return np.where(seen, np.minimum(low, seen_s), low), np.where(seen, np.maximum(high, seen_s), high)


def source(times: StepTimes, cell: int) -> str:
    """What a cell rests on: its own reports, a profile, both; for one that nobody measured, what the others rest on."""
    online, profiled = bool(times.num_seen[cell]), bool(times.profiled[cell])
    if not online and not profiled:
        online, profiled = bool(times.num_seen.any()), bool(times.profiled.any())
    return "both" if profiled and online else "profile" if profiled else "online" if online else "prior"


def plan_estimates(context: Context, group: Group, bucket: int | None = None) -> dict[Bucket, list[ShownPlan]]:
    """Plans that copy, of one bucket or of those where rows did: the one in use, if one is, then the best others."""
    if group.plans is None or not group.choice.decided:
        return {}
    places = group.plans.visited if bucket is None else np.array([bucket])
    found = group.plans.estimates(places, context.tokens(group)[places])
    return {
        context.buckets[at]: [ShownPlan(each, each.plan == group.plans.chosen[at]) for each in plans]
        for at, plans in zip(places.tolist(), found, strict=True)
    }
