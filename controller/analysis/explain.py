"""The numbers behind a choice, and the same in words: pure functions of a controller's state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from speclen.controller.estimator.core import Bucket, ContextKey, LearnedRow
from speclen.controller.estimator.estimator import Estimator


@dataclass(frozen=True, slots=True)
class Change:
    """When a bucket's choice last changed. when: as the caller wants it read, such as a date; "" if unknown."""

    previous_length: int | None
    speculation_length: int
    reason: str
    when: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is believed about one bucket. rows: every length, ascending.

    survival[i]: P(draft tokens 0..i all accepted) at this load. runner_up: best length other than the choice, None if
    there is no other; advantage: how much more goodput the choice promises, as a share (negative while the choice is
    only kept because its rival has not won by the margin).
    """

    context: ContextKey
    bucket: Bucket
    batch_size: int
    speculation_length: int
    survival: tuple[float, ...]
    rows: tuple[LearnedRow, ...]
    runner_up: int | None
    advantage: float | None
    noise: float  # log-sd of one step's time
    speed: float  # how many times their usual time steps take at the moment
    speed_sd: float  # log-sd of how that wanders
    resume_s: float  # what the first step after length 0 costs extra
    num_reports: int
    last_change: Change | None

    @property
    def chosen(self) -> LearnedRow:
        """The row of the choice."""
        return self.rows[self.speculation_length]


def explain(
    estimator: Estimator, key: ContextKey, batch_size: int, last_change: Change | None = None, worker_id: str = ""
) -> Explanation:
    """Why a batch of that size gets its length, on most workers, or on one that may be unlike the others.

    last_change: from the store; without it, what the controller itself remembers since its start. Raises KeyError for
    an unknown context, ValueError for a batch size beyond its limit or while nothing is known.
    """
    limit = estimator.limits(key).max_batch_size
    if not 1 <= batch_size <= limit:
        raise ValueError(f"batch size {batch_size} is outside what this context was registered with: use 1 to {limit}")
    context = estimator.context(key)
    times = context.group_of(worker_id).times
    if not times.known:
        raise ValueError(
            "nothing is known about this context yet: let a worker decode a few steps, or import a profile"
        )
    index = estimator.bucket_index(key, batch_size)
    rows = tuple(row for row in estimator.learned_rows(key, worker_id) if row.bucket.index == index)
    length = estimator.length_for(key, batch_size, worker_id)
    others = [row for row in rows if row.estimate.speculation_length != length]
    rival = min(others, key=lambda row: row.estimate.ms_per_token, default=None)
    chosen_ms = rows[length].estimate.ms_per_token
    decision = estimator.last_decision(key, index, worker_id)
    if last_change is None and decision is not None:
        last_change = Change(decision.previous_length, decision.speculation_length, decision.reason)
    speeds = [times.watch.speed_of(worker_id)] if worker_id else list(times.watch.speeds.values())
    return Explanation(
        context=key,
        bucket=context.buckets[index],
        batch_size=batch_size,
        speculation_length=length,
        survival=tuple(estimator.survival(key, index)),
        rows=rows,
        runner_up=None if rival is None else rival.estimate.speculation_length,
        advantage=None if rival is None else rival.estimate.ms_per_token / chosen_ms - 1.0,
        noise=times.noise,
        speed=math.exp(fmean(speed.mean for speed in speeds)) if speeds else 1.0,
        speed_sd=max((speed.sd for speed in speeds), default=0.0),
        resume_s=context.resume_s,
        num_reports=int(times.num_seen.sum()),
        last_change=last_change,
    )


def in_words(explanation: Explanation) -> list[str]:
    """The explanation as sentences, one per entry."""
    chosen, bucket = explanation.chosen.estimate, explanation.bucket
    sizes = (
        str(bucket.batch_min) if bucket.batch_min == bucket.batch_max else f"{bucket.batch_min} to {bucket.batch_max}"
    )
    length = explanation.speculation_length
    drafting = "does not draft (plain decoding)" if length == 0 else f"drafts {length} token{'s' if length > 1 else ''}"
    sentences = [
        f"A batch of {explanation.batch_size} (bucket {sizes}) {drafting}.",
        f"A step at that length gives {chosen.expected_tokens:.2f} tokens per row in {1e3 * chosen.step_s:.3g} ms: "
        f"{chosen.ms_per_token:.4g} ms per token (95%: {chosen.ms_per_token_low:.4g} to {chosen.ms_per_token_high:.4g}), "
        f"known from {explanation.chosen.num_steps} steps here and {explanation.num_reports} in all.",
    ]
    sentences += _about_rival(explanation) + _about_survival(explanation)
    if explanation.speed_sd > 0.03:
        sentences.append(
            f"The device's speed wanders by {100 * explanation.speed_sd:.0f}%: the newest steps took "
            f"{explanation.speed:.2f} times their usual time, whatever their length."
        )
    if explanation.resume_s > 0.0:
        sentences.append(f"Drafting again after length 0 costs {1e3 * explanation.resume_s:.3g} ms once.")
    change = explanation.last_change
    if change is not None:
        before = "nothing" if change.previous_length is None else f"length {change.previous_length}"
        when = f" ({change.when})" if change.when else ""
        sentences.append(
            f"The choice last changed{when} from {before} to length {change.speculation_length}: {change.reason}."
        )
    return sentences


def _about_rival(explanation: Explanation) -> list[str]:
    if explanation.runner_up is None or explanation.advantage is None:
        return ["There is no other length to choose."]
    rival = explanation.rows[explanation.runner_up].estimate
    percent = 100.0 * explanation.advantage
    overlap = rival.ms_per_token_low < explanation.chosen.estimate.ms_per_token_high
    sure = "their intervals overlap, so this may still change" if overlap else "their intervals do not overlap"
    if percent < 0.0:
        return [
            f"Length {explanation.runner_up} promises {-percent:.1f}% more goodput ({rival.ms_per_token:.4g} ms per token), "
            "too little to change for."
        ]
    return [
        f"The runner-up, length {explanation.runner_up}, needs {rival.ms_per_token:.4g} ms per token: "
        f"{percent:.1f}% worse; {sure}."
    ]


def _about_survival(explanation: Explanation) -> list[str]:
    if not explanation.survival:
        return []
    shown = ", ".join(f"{100 * value:.0f}%" for value in explanation.survival)
    return [f"Draft tokens 1 to {len(explanation.survival)} survive with {shown} at this load."]
