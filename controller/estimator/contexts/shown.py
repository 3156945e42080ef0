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
# By whether it was profiled, and whether it was reported.
SOURCES = {(True, True): "both", (True, False): "profile", (False, True): "online", (False, False): "prior"}


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
    estimates = zip(
        *(each.tolist() for each in (tokens, seconds, seconds * 1e3 / tokens, low, high, bare)), strict=True
    )
    seen = zip(*(each.tolist() for each in (times.num_seen, times.total_s, times.seen_at)), sources(times), strict=True)
    rows = []
    for cell, (estimate, (num_seen, total_s, seen_at, source)) in enumerate(zip(estimates, seen, strict=True)):
        at, length = divmod(cell, num_lengths)
        observed = total_s / num_seen if num_seen else None
        since = int(times.clock - seen_at) if num_seen else None
        best = length == group.lengths[at]
        known = LengthEstimate(length, *estimate)
        rows.append(LearnedRow(context.buckets[at], known, int(num_seen), source, best, observed, since))
    return rows


def interval(times: StepTimes) -> tuple[FloatArray, FloatArray]:
    """Bounds of each cell's mean step time, 95%, that hold what was seen where enough was."""
    wandering = max((speed.sd for speed in times.watch.speeds.values()), default=0.0)
    spread = np.exp(np.minimum(1.96 * np.sqrt(times.variance + wandering**2), LARGEST_SPREAD))
    seconds, seen_s = times.seconds().reshape(-1), times.total_s / np.maximum(times.num_seen, 1.0)
    low, high, seen = seconds / spread, seconds * spread, times.num_seen >= SHOWN_REPORTS
    return np.where(seen, np.minimum(low, seen_s), low), np.where(seen, np.maximum(high, seen_s), high)


def sources(times: StepTimes) -> list[str]:
    """What each cell rests on: its own reports, a profile, both; where nobody measured it, what the others rest on."""
    online, profiled = times.num_seen > 0, times.profiled > 0
    of_others = SOURCES[bool(profiled.any()), bool(online.any())]
    return [SOURCES[pair] if any(pair) else of_others for pair in zip(profiled.tolist(), online.tolist(), strict=True)]


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
