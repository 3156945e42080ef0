"""What workers of a context are told: a table, numbers for mixed batches, probes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.contexts.context import Context
from speclen.controller.estimator.contexts.group import Group
from speclen.controller.estimator.core import Choice, Mix, Probe, Table


def table(context: Context, group: Group) -> Table:
    """The best length known for every bucket, and the plan where one that copies is thought to be better."""
    plans = [None] * len(group.lengths) if group.plans is None else group.plans.chosen
    chosen = list(zip(context.buckets, group.lengths, plans, strict=True))
    if not group.times.known:
        return Table(group.version, tuple(Choice(at, length, None, plan) for at, length, plan in chosen))
    choice = group.choice
    ms, bare = 1e3 / choice.goodput, 1e3 * choice.step_s / choice.tokens
    # Of another policy's table nobody but that policy knows what it would choose among fewer lengths.
    within = [()] * len(chosen) if context.policy is not None else best_within(ms * np.exp(choice.doubt))
    choices = tuple(
        Choice(at, length, float(ms[at.index, length]), plan, float(bare[at.index, length]), within[at.index])
        for at, length, plan in chosen
    )
    return Table(group.version, choices)


def best_within(ms: FloatArray) -> list[tuple[int, ...]]:
    """Of each row the length with the least of its first one, two, ... values."""
    is_least = ms <= np.minimum.accumulate(ms, axis=1)
    lengths = np.maximum.accumulate(np.where(is_least, np.arange(ms.shape[1]), 0), axis=1)
    return [tuple(row) for row in lengths.tolist()]


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
