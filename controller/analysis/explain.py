"""The numbers behind a choice, and the same in words: pure functions of a controller's state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.core import Bucket, ContextKey, LearnedRow
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.choice import PlanEstimate, ShownPlan


@dataclass(frozen=True, slots=True)
class Change:
    """When a bucket's choice last changed. when: as the caller wants it read, such as a date; "" if unknown."""

    previous_length: int | None
    speculation_length: int
    reason: str
    when: str = ""
    previous_plan: str | None = None  # in words, where rows copied; the lengths are the draft model's then
    plan: str | None = None


@dataclass(frozen=True, slots=True)
class CopyingRows:
    """What rows do in a step under the plan in use; its expected tokens are made of the same.

    share: of rows that copy. right: share of the tokens that they copy. tokens, tokens_of_others: what a row puts out that
    copies, and one that does not.
    """

    share: float
    right: float
    tokens: float
    tokens_of_others: float


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
    plans: tuple[ShownPlan, ...] = ()  # that copy: the one in use, if one is, then the best others
    copying_rows: CopyingRows | None = None  # under the plan in use

    @property
    def plan(self) -> PlanEstimate | None:
        """The plan in use, where rows copy."""
        return next((shown.estimate for shown in self.plans if shown.is_best), None)

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
    group = context.group_of(worker_id)
    plans = tuple(estimator.plan_estimates(key, worker_id, index).get(context.buckets[index], ()))
    in_use = next((shown.estimate for shown in plans if shown.is_best), None)
    decision = estimator.last_decision(key, index, worker_id)
    if last_change is None and decision is not None:
        last_change = Change(
            *(decision.previous_length, decision.speculation_length, decision.reason, ""),
            *(None if plan is None else str(plan) for plan in (decision.previous_plan, decision.plan)),
        )
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
        plans=plans,
        copying_rows=None if in_use is None else _copying_rows(context, group, index, in_use),
    )


def _copying_rows(context: Context, group: Group, bucket: int, used: PlanEstimate) -> CopyingRows | None:
    """Of a bucket's plan, from the same source as its expected tokens, so that all of these numbers can be true at once."""
    plans = group.plans
    if plans is None:
        return None
    at = plans.place[used.plan]
    alone = plans.draft_tokens(context.tokens(group)[[bucket]])[:, plans.length_at]
    per_row, share, copied, proposes = (each[0, at] for each in plans.of_rows(np.array([bucket]), alone))
    proposed, kept = float(proposes.sum()), float(copied - share)
    return CopyingRows(
        share=float(share),
        right=min(kept / proposed, 1.0) if proposed > 0.0 else 0.0,
        tokens=float(copied / share) if share > 0.0 else 0.0,
        tokens_of_others=float((per_row - copied) / (1.0 - share)) if share < 1.0 else 0.0,
    )


def in_words(explanation: Explanation) -> list[str]:
    """The explanation as sentences, one per entry."""
    sentences = (
        _about_plan(explanation, explanation.plan) if explanation.plan is not None else _about_length(explanation)
    )
    sentences += _about_survival(explanation)
    if explanation.speed_sd > 0.03:
        sentences.append(
            f"The device's speed wanders by {100 * explanation.speed_sd:.0f}%: the newest steps took "
            f"{explanation.speed:.2f} times their usual time, whatever their length."
        )
    if explanation.resume_s > 0.0:
        sentences.append(f"Drafting again after length 0 costs {1e3 * explanation.resume_s:.3g} ms once.")
    change = explanation.last_change
    if change is not None:
        before = change.previous_plan or (
            "nothing" if change.previous_length is None else f"length {change.previous_length}"
        )
        after = change.plan or f"length {change.speculation_length}"
        when = f" ({change.when})" if change.when else ""
        sentences.append(f"The choice last changed{when} from {before} to {after}: {change.reason}.")
    return sentences


def _of_batch(explanation: Explanation) -> str:
    bucket = explanation.bucket
    sizes = (
        str(bucket.batch_min) if bucket.batch_min == bucket.batch_max else f"{bucket.batch_min} to {bucket.batch_max}"
    )
    return f"A batch of {explanation.batch_size} (bucket {sizes})"


def _about_length(explanation: Explanation) -> list[str]:
    chosen, length = explanation.chosen.estimate, explanation.speculation_length
    drafting = "does not draft (plain decoding)" if length == 0 else f"drafts {length} token{'s' if length > 1 else ''}"
    return [
        f"{_of_batch(explanation)} {drafting}.",
        f"A step at that length gives {chosen.expected_tokens:.2f} tokens per row in {1e3 * chosen.step_s:.3g} ms: "
        f"{chosen.ms_per_token:.4g} ms per token (95%: {chosen.ms_per_token_low:.4g} to {chosen.ms_per_token_high:.4g}), "
        f"known from {explanation.chosen.num_steps} steps here and {explanation.num_reports} in all.",
        *_about_rival(explanation),
        *_about_idle_plan(explanation),
    ]


def _about_plan(explanation: Explanation, used: PlanEstimate) -> list[str]:
    """Why rows copy, and what the best other plan and the best length would cost."""
    sentences = [
        f"{_of_batch(explanation)} plays '{used.plan}'.",
        f"A step of it gives {used.expected_tokens:.2f} tokens per row in {1e3 * used.step_s:.3g} ms: "
        f"{used.ms_per_token:.4g} ms per token (95%: {used.ms_per_token_low:.4g} to {used.ms_per_token_high:.4g}).",
    ]
    rows = explanation.copying_rows
    if rows is not None:
        sentences.append(
            f"{100 * rows.share:.0f}% of the rows find their last tokens in their own text and copy; copied tokens are "
            f"accepted in {100 * rows.right:.0f}% of the cases and cost no draft pass: such a row puts out "
            f"{rows.tokens:.2f} tokens, any other {rows.tokens_of_others:.2f}."
        )
    length = explanation.chosen.estimate
    rivals = [
        (shown.estimate.ms_per_token, f"'{shown.estimate.plan}'") for shown in explanation.plans if not shown.is_best
    ]
    rivals.append((length.ms_per_token, f"length {length.speculation_length} without copies"))
    for ms, name in sorted(rivals):
        percent = 100.0 * (ms / used.ms_per_token - 1.0)
        worse = (
            f"{percent:.1f}% worse"
            if percent >= 0.0
            else f"{-percent:.1f}% better, too little or too unsure to change for"
        )
        sentences.append(f"{name[0].upper()}{name[1:]} would need {ms:.4g} ms per token: {worse}.")
    return sentences


def _about_idle_plan(explanation: Explanation) -> list[str]:
    """What copying would cost where it is not done."""
    if not explanation.plans:
        return []
    best, now = explanation.plans[0].estimate, explanation.chosen.estimate.ms_per_token
    percent = 100.0 * (best.ms_per_token / now - 1.0)
    worse = (
        f"{percent:.1f}% worse"
        if percent >= 0.0
        else f"{-percent:.1f}% better by its best guess, too unsure to change for"
    )
    return [
        f"Rows do not copy: the best plan that does, '{best.plan}', would need {best.ms_per_token:.4g} ms per token: "
        f"{worse}."
    ]


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
