"""What workers of a context are told: a table, numbers for mixed batches, probes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.core import Choice, Mix, Probe, Table


def table(context: Context, group: Group) -> Table:
    """The best length known for every bucket, and the plan where one that copies is thought to be better."""
    plans = [None] * len(group.lengths) if group.plans is None else group.plans.chosen
    chosen = list(zip(context.buckets, group.lengths, plans, strict=True))
    if not group.times.known:
        return Table(group.version, tuple(Choice(at, length, None, plan) for at, length, plan in chosen))
    ms = 1e3 / group.choice.goodput
    choices = tuple(Choice(at, length, float(ms[at.index, length]), plan) for at, length, plan in chosen)
    return Table(group.version, choices)


def mix(context: Context, group: Group) -> Mix | None:
    """The numbers by which a worker finds the length for the classes of its rows; None while nothing is known."""
    if not group.times.known or context.policy is not None:
        return None
    tokens = group.acceptance.tokens[:, context.bands, : context.limits.max_speculation_length + 1]
    counted = group.choice.seconds * np.exp(group.choice.doubt)
    return Mix(tuple(bucket.batch_max for bucket in context.buckets), counted, tokens)


def probe(
    context: Context, group: Group, buckets: Iterable[int], longest: int, max_copied: int, num_steps: int
) -> Probe | None:
    """The first exploratory plan, of so many steps, that one of the buckets can pay for, charged to it; mostly None."""
    for bucket in buckets:
        tried = context.probe(group, bucket, (longest, max_copied), num_steps)
        if tried is None:
            continue
        probe_id = context.next_probe_id
        context.next_probe_id += 1
        return Probe(probe_id, context.buckets[bucket], tried.draft_length, tried if tried.copy_min_match else None)
    return None
