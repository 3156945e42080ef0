"""Choosing anew by the newest estimates, and why a bucket plays something else than before, in words and numbers."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.core import Bucket, Decision
from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.plan import Plan

# Drift is named as the reason of a decision for so many reports.
DRIFT_NAMED_REPORTS = 1000


def redecide(context: Context, group: Group, cause: str = "") -> list[Decision]:
    """Choose anew by the newest estimates; returns what changed, and why."""
    group.seen = group.newest
    tokens = context.tokens(group)
    group.choice.decide(tokens, group.times, context.resume_s, context.prompts.share)
    chosen: list[int] = group.choice.lengths.tolist() if context.policy is None else context.policy.pull_all()
    before = group.played
    group.lengths = chosen
    if group.plans is not None:
        _decide_plans(context, group, group.plans, tokens)
    after = group.played
    if before == after:
        return []
    group.version += 1
    changes = zip_longest(context.buckets, before, after)
    changed = [_explained(context, group, bucket, old, new, cause) for bucket, old, new in changes if old != new]
    group.last_decision |= {decision.bucket.index: decision for decision in changed}
    return changed


def _decide_plans(context: Context, group: Group, plans: PlanChoice, tokens: FloatArray) -> None:
    """Where rows copy, and how, in buckets that there is news of. tokens: expected without copies, [buckets, lengths]."""
    context.tell_plans(group)
    if not group.choice.decided:
        return
    buckets = plans.due(context.recent)
    if len(buckets):
        plans.decide(buckets, tokens[buckets], group.choice)


def _explained(
    context: Context, group: Group, bucket: Bucket, before: Plan | int | None, after: Plan | int, cause: str
) -> Decision:
    old, new = as_plan(before), as_plan(after) or Plan()
    lengths = None if old is None else old.draft_length, new.draft_length
    copied, copies = (each if each is not None and each.copy_min_match else None for each in (old, new))
    of_all = group is context.main
    if not group.times.known:
        reason = "nothing is known yet: a cautious length until the first steps were measured"
        return Decision(context.key, bucket, group.version, *lengths, None, None, reason, copied, copies, of_all)
    now = ms_per_token(context, group, bucket, new)
    then = None if old is None else ms_per_token(context, group, bucket, old)
    if then is None:
        reason = f"first choice: {in_words(new)} at {now:.4g} ms per token"
    else:
        gain = 100.0 * (then / now - 1.0)
        reason = f"{in_words(new)} promises {now:.4g} ms per token, {in_words(old)} {then:.4g} ({gain:+.1f}% goodput)"
    cause = cause or _drift_in_words(context)
    reason = f"{reason}; {cause}" if cause else reason
    return Decision(context.key, bucket, group.version, *lengths, then, now, reason, copied, copies, of_all)


def ms_per_token(context: Context, group: Group, bucket: Bucket, plan: Plan) -> float:
    """Expected time per row and token of a length or of a plan of the grid, in milliseconds."""
    if not plan.copy_min_match or group.plans is None:
        at, choice = (bucket.index, plan.draft_length), group.choice
        return 1e3 * float(choice.seconds[at] / choice.tokens[at])
    known = group.plans.assess(np.array([bucket.index]), context.tokens(group)[[bucket.index]])
    place = group.plans.place[plan]
    return 1e3 * float(known.seconds[0, place] / known.tokens[0, place])


def _drift_in_words(context: Context) -> str:
    """What drifted lately, or ""."""
    drift = context.last_drift
    if drift is None or context.reports_since_drift >= DRIFT_NAMED_REPORTS:
        return ""
    return f"{drift.factor} {'rose' if drift.statistic > 0 else 'fell'} {context.reports_since_drift} reports ago"


def as_plan(chosen: Plan | int | None) -> Plan | None:
    """A length as the plan that it is."""
    return Plan(chosen) if isinstance(chosen, int) else chosen


def in_words(plan: Plan | None) -> str:
    """A length is called so; plans have words of their own."""
    return str(plan) if plan is not None and plan.copy_min_match else f"length {plan.draft_length if plan else 0}"
