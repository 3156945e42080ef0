"""A context as plain values, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from speclen.controller.estimator.acceptance import NUM_CLASSES, Acceptance
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.core import DriftEvent
from speclen.controller.estimator.plans.copying import Copying
from speclen.controller.estimator.plans.saved import exported_plans, restore_plans
from speclen.controller.estimator.state import exported, restored

# Of the exported state. An older one is not restored: what it knew is learned again from the reports that are kept.
FORMAT = 16


def exported_context(context: Context, policy_name: str) -> dict[str, Any]:
    """Everything that a context needs to go on exactly, but for what its pair's contexts share."""
    drift, policy = context.last_drift, context.policy
    state: dict[str, Any] = exported(context)
    return state | {
        "format": FORMAT,
        "policy": [policy_name, None if policy is None else policy.export_state()],
        "buckets": [bucket.batch_max for bucket in context.buckets],
        "lengths": context.limits.max_speculation_length,
        "times": exported(context.times),
        "acceptances": exported(context.acceptances[1:]),
        "groups": [[*models, exported(group)] for models, group in context.groups.items()],
        "plans": [exported_plans(group.plans) for group in context.groups.values()],
        "last_drift": None if drift is None else [drift.factor, drift.statistic, drift.detail],
    }


def restored_acceptance(state: dict[str, Any]) -> Acceptance:
    """The model that was exported. Raises ValueError and others where it is not usable."""
    kept = state["rows"]
    classes, bands, _, positions = kept["shape"] if isinstance(kept, dict) else np.shape(kept)
    model: Acceptance = restored(Acceptance(positions, bands, classes), state)
    model.renew()
    if classes != NUM_CLASSES or not model.sound:
        raise ValueError(f"it has {classes} classes of requests, or counts that are none")
    return model


def restored_copying(state: Any) -> Copying:
    """What was known of copying. Raises ValueError and others where it is not usable."""
    copying: Copying = restored(Copying(), state)
    if not copying.sound:
        raise ValueError("it has counts of copies that are none")
    copying.renew()
    return copying


def restore_context(context: Context, state: dict[str, Any], policy_name: str) -> str:
    """Go on from an exported state; returns why lengths must be chosen anew, or "".

    Raises ValueError and others where it is not usable.
    """
    if state["format"] != FORMAT or state["buckets"] != [bucket.batch_max for bucket in context.buckets]:
        raise ValueError("it is of another version or has other buckets")
    restored(context, state)
    context.workers.renew()
    if not context.prompts.sound:
        raise ValueError("it has prompts whose costs are no numbers")
    context.times = [restored(context.new_times(), each) for each in state["times"]]
    context.acceptances[1:] = [restored_acceptance(each) for each in state["acceptances"]]
    for times in context.times:
        times.renew()
        if not times.sound:
            raise ValueError("it has numbers that are none")
    context.groups.clear()
    for at_times, at_acceptance, values in state["groups"]:
        group = restored(context.group((at_times, at_acceptance)), values)
        group.seen = group.newest
        longest = context.limits.max_speculation_length
        if len(group.lengths) != len(context.buckets) or not all(0 <= each <= longest for each in group.lengths):
            raise ValueError(f"{group.lengths} are not lengths of {len(context.buckets)} buckets")
    for group, plans in zip(context.groups.values(), state.get("plans", ()), strict=False):
        restore_plans(group.plans, plans)
        context.tell_plans(group)
        group.seen = group.newest
    for group in context.groups.values():
        if group.choice.decided:
            group.choice.assess(context.tokens(group), group.times, context.prompts.share)
    context.main = context.group((0, 0))
    drift = state["last_drift"]
    context.last_drift = None if drift is None else DriftEvent(context.key, *drift)
    before, values = state["policy"]
    if before != policy_name:
        return f"the policy changed from {before} to {policy_name}"
    if context.policy is not None:
        context.policy.restore(values)
    return ""
