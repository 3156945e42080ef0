"""Features of a step for the surface of step times, and the prior of their weights.

A step time is a sum of non-negative parts: a constant, sequences, drafting at all, draft passes, sequences in draft
passes, verified tokens with a slope for every doubling, and tokens held in context. So the surface is monotone, and what
is learned at one batch size and arm says something of all others.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray

NUM_PARTS = 5  # features before the slopes
FIRST_KNOT, NUM_SLOPES = 8, 11  # verified tokens up to which one slope serves; the last begins at 4,096
NUM_FEATURES = NUM_PARTS + NUM_SLOPES + 1
KNOTS = np.concatenate([[0.0], FIRST_KNOT * 2.0 ** np.arange(NUM_SLOPES - 1)])
WIDTHS = np.append(np.diff(KNOTS), np.inf)
# Weights in units of a plain step of one sequence: typical, and the standard deviation of their logarithm. A draft model
# may take 1% or 50% of the target's time; a verified token 0.4% (H200) or 5% (CPU); contexts perhaps nothing.
CONSTANT, CONSTANT_SD = 0.85, 0.3
DRAFTING, PASS, ONE, HELD, SD = 0.02, 0.08, 0.01, 1e-6, 1.5  # ONE: a sequence, a drafted one, a verified token
SLOPE_ALIKE = 0.8  # correlation of neighbouring slopes


def features_of(batch: Array, passes: Array, drafted: Array, verified: Array, context: Array) -> Array:
    """[n, NUM_FEATURES] of steps.

    batch: sequences; passes: of the draft model; drafted: sequences in each; verified: tokens; context: tokens held per
    sequence; [n] each.
    """
    features = np.empty((len(batch), NUM_FEATURES))
    features[:, 0], features[:, 1], features[:, 2], features[:, 3] = 1.0, batch, passes > 0, passes
    features[:, 4], features[:, -1] = passes * drafted, batch * context
    features[:, NUM_PARTS:-1] = np.minimum(np.maximum(verified[:, None] - KNOTS, 0.0), WIDTHS)
    return features


def _prior_precision() -> Array:
    alike, at, slopes = np.eye(NUM_FEATURES), np.arange(NUM_SLOPES), slice(NUM_PARTS, NUM_PARTS + NUM_SLOPES)
    alike[slopes, slopes] = SLOPE_ALIKE ** np.abs(at[:, None] - at)
    spread = np.array([CONSTANT_SD, *[SD] * (NUM_FEATURES - 1)])
    precision: Array = np.linalg.inv(alike * np.outer(spread, spread))
    return precision


# Gaussian prior of the log weights, before anything was seen.
PRIOR_MEAN = np.log([CONSTANT, ONE, DRAFTING, PASS, *[ONE] * (1 + NUM_SLOPES), HELD])
PRIOR_PRECISION = _prior_precision()


def shares(features: Array, phi: Array) -> tuple[Array, Array]:
    """Log of the surface, [n], and its gradient by phi, [n, NUM_FEATURES]: the share of each part in the whole."""
    parts = features * np.exp(phi)
    total = parts.sum(axis=1)
    return np.log(total), parts / total[:, None]
