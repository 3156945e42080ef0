"""Features of a step for the surface of step times, and the prior of their weights.

A step time is a sum of non-negative parts: a constant, sequences, drafting at all, draft passes, sequences in draft
passes, verified tokens with a slope for every doubling, and tokens held in context. So the surface is monotone, and what
is learned at one batch size and arm says something of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Array = np.ndarray

FIRST_KNOT = 8  # verified tokens up to which one slope serves
NUM_PARTS = 5  # features before the slopes
# Weights in units of a plain step of one sequence: typical, and the standard deviation of their logarithm. A draft model
# may take 1% or 50% of the target's time; that sequences or contexts cost anything is not taken for granted.
CONSTANT, CONSTANT_SD = 0.85, 0.3
SEQUENCE, DRAFTING, PASS, DRAFTED, SLOPE, CONTEXT, SD = 0.002, 0.02, 0.08, 0.001, 0.005, 1e-6, 1.5
SLOPE_ALIKE = 0.8  # correlation of neighbouring slopes


class Prior(NamedTuple):
    """Gaussian prior of the log weights. mean: [p]; precision: [p, p]."""

    mean: Array
    precision: Array


def num_slopes(most_verified: int) -> int:
    """Slopes that cover so many verified tokens."""
    return 1 + max(0, int(np.ceil(np.log2(max(most_verified, 1) / FIRST_KNOT))))


def features_of(columns: Sequence[Array], slopes: int) -> Array:
    """[n, p] of steps. columns: batch size, passes of the draft model, sequences in each, verified tokens, and tokens
    held per sequence, [n] each."""
    batch, passes, drafted, verified, context = columns
    knots, widths = _knots(slopes)
    features = np.empty((len(batch), NUM_PARTS + slopes + 1))
    features[:, 0], features[:, 1], features[:, 2], features[:, 3] = 1.0, batch, passes > 0, passes
    features[:, 4], features[:, -1] = passes * drafted, batch * context
    features[:, NUM_PARTS:-1] = np.minimum(np.maximum(verified[:, None] - knots, 0.0), widths)
    return features


@lru_cache
def _knots(slopes: int) -> tuple[Array, Array]:
    """Verified tokens at which each slope begins, and how many it covers."""
    knots = np.concatenate([[0.0], FIRST_KNOT * 2.0 ** np.arange(slopes - 1)])
    return knots, np.append(np.diff(knots), np.inf)


def prior_of(slopes: int) -> Prior:
    """Before anything was seen."""
    mean = np.log([CONSTANT, SEQUENCE, DRAFTING, PASS, DRAFTED, *[SLOPE] * slopes, CONTEXT])
    spread = np.array([CONSTANT_SD, *[SD] * (len(mean) - 1)])
    alike = np.eye(len(mean))
    at = np.arange(slopes)
    alike[NUM_PARTS : NUM_PARTS + slopes, NUM_PARTS : NUM_PARTS + slopes] = SLOPE_ALIKE ** np.abs(at[:, None] - at)
    return Prior(mean, np.linalg.inv(alike * np.outer(spread, spread)))


def shares(features: Array, phi: Array) -> tuple[Array, Array]:
    """Log of the surface, [n], and its gradient by phi, [n, p]: the share of each part in the whole."""
    parts = features * np.exp(phi)
    total = parts.sum(axis=1)
    return np.log(total), parts / total[:, None]
