"""The shape of a step's time: what grows with batch size, length and context, in a form that is linear in its weights.

A step drafts s times, then verifies x = b (s + 1) tokens at once. The verifying pass is flat while the weights' traffic
dominates and grows once arithmetic does; where that knee lies differs from device to device, hence the ramps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speclen.controller.estimator.arrays import FloatArray

# Weights of the first features, in units of the time of a single plain step: 1, 1[s > 0], s, s b, x, bc, s b c, b. On a GPU
# few verified tokens cost next to nothing, on a CPU each 3% to 9%, and a row as much again, however few of its tokens are
# verified: hence the spread of x and of b. Without b that would pass for verified tokens, and what is learned from small
# batches would make long drafts look too dear in large ones.
PRIOR_WEIGHTS = (0.85, 0.03, 0.08, 0.0008, 0.001, 0.004, 0.0004, 0.001)
PRIOR_SDS = (0.5, 0.05, 0.08, 0.003, 0.02, 0.02, 0.002, 0.05)
# Weights that a machine cannot make negative. The ramps may have either sign.
NUM_NON_NEGATIVE = 8
# Slope of all ramps together at the prior; and what a ramp may add until x has doubled, in the same unit.
RAMP_SLOPE = 1.0 / 128.0
RAMP_SD = 0.35
FIRST_KNOT = 16
TOKENS_PER_CONTEXT_UNIT = 1024.0


@dataclass(frozen=True)
class FeatureMap:
    """Maps (batch size, length, mean context length) to features; knots double from 16 up to half the largest x."""

    max_batch_size: int
    max_length: int

    @property
    def knots(self) -> FloatArray:
        """Verified tokens at which a ramp begins."""
        largest, knots = self.max_batch_size * (self.max_length + 1) / 2.0, [float(FIRST_KNOT)]
        while knots[-1] * 2 <= largest:
            knots.append(knots[-1] * 2)
        return np.array(knots)

    def prior(self) -> tuple[FloatArray, FloatArray]:
        """Mean and sd of the weights, in units of the time of a single plain step."""
        num_knots = len(self.knots)
        mean = np.concatenate([PRIOR_WEIGHTS, np.full(num_knots, RAMP_SLOPE / num_knots)])
        return mean, np.concatenate([PRIOR_SDS, RAMP_SD / self.knots])


def features(batch: FloatArray, length: FloatArray, context: FloatArray, knots: FloatArray) -> FloatArray:
    """Features [n, 8 + knots] of n steps. context: mean tokens held per row."""
    out = np.empty((len(batch), NUM_NON_NEGATIVE + len(knots)))
    verified = batch * (length + 1.0)
    held = batch * context / TOKENS_PER_CONTEXT_UNIT
    out[:, 0] = 1.0
    out[:, 1] = length > 0
    out[:, 2] = length
    out[:, 3] = length * batch
    out[:, 4] = verified
    out[:, 5] = held
    out[:, 6] = length * held
    out[:, 7] = batch
    np.maximum(verified[:, None] - knots, 0.0, out=out[:, NUM_NON_NEGATIVE:])
    return out


def fit_relative(
    rows: FloatArray, seconds: FloatArray, prior_mean: FloatArray, prior_sd: FloatArray, relative_sd: float = 0.05
) -> FloatArray:
    """Weights that fit measured times in relative terms, drawn towards the prior where the data are silent.

    rows: [n, d]; seconds: [n]; prior in seconds. Weights that cannot be negative are not.
    """
    scaled = rows / (seconds[:, None] * relative_sd)
    precision = scaled.T @ scaled + np.diag(prior_sd**-2.0)
    target = scaled.T @ np.full(len(seconds), 1.0 / relative_sd) + prior_mean / prior_sd**2.0
    weights: FloatArray = np.linalg.solve(precision, target)
    for _ in range(NUM_NON_NEGATIVE):
        negative = np.flatnonzero(weights[:NUM_NON_NEGATIVE] < 0.0)
        if not len(negative):
            break
        # Pin them at 0 by a very strong prior and let the others make up for it.
        precision[negative, negative] *= 1e9
        weights = np.linalg.solve(precision, target)
        weights[negative] = 0.0
    return weights
