"""A group of steps as arrays, and what belongs to each worker's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray

Spans = Sequence[tuple[str, slice]]  # each worker of a group and its place in it
ByStep = FloatArray | float  # [n], or what is the same for all steps of a group


class Steps(NamedTuple):
    """A group of steps: batch, length, context (tokens held per row), seconds, weight, all [n].

    offset: log time that its worker's steps are known to take longer than others'. spans: each worker and its place.
    num_steps: that each entry stands for, whose noise is less by its root.
    """

    spans: Spans
    batch: np.ndarray
    length: np.ndarray
    context: FloatArray
    seconds: FloatArray
    weight: FloatArray
    offset: FloatArray
    num_steps: FloatArray


def spans_of(senders: Sequence[str]) -> Spans:
    """Each sender with its place in a group. One that appears twice has two places."""
    spans, start = [], 0
    for sender, members in groupby(senders):
        end = start + sum(1 for _ in members)
        spans.append((sender, slice(start, end)))
        start = end
    return spans


def by_step(spans: Spans, values: Sequence[float]) -> ByStep:
    """A worker's value for each of its steps, [n]; of a single worker its value, which is quicker."""
    if len(spans) == 1:
        return values[0]
    steps: FloatArray = np.repeat(values, [span.stop - span.start for _, span in spans])
    return steps


def summed(spans: Spans, values: Sequence[np.ndarray]) -> list[list[float]]:
    """Sums over each worker's steps, by value. values: each [n]."""
    sums: list[list[float]] = np.add.reduceat(np.array(values), [span.start for _, span in spans], axis=1).tolist()
    return sums
