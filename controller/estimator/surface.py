"""A step's time as a smooth function of what the step does, positive and monotone by construction.

    m = sum_i exp(phi_i) f_i(rows, draft passes, verified tokens, context)

Positive weights exp(phi_i) on features that grow. The gradient of log m in phi is a set of shares that sum to 1, so no
data can blow it up.
"""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.arrays import FloatArray

# Weights of the features before anything is known, as multiples of a plain step's time, and their log-sds: constant, any
# draft pass, draft passes, rows in draft passes, rows, held context (1024 tokens) per target and per draft pass, and the
# slope per verified token, in segments that end where the number of verified tokens has doubled. On a GPU few verified
# tokens cost next to nothing, on a CPU each 3% to 9%, hence the wide slopes. Neighbouring slopes resemble each other.
WEIGHTS = (0.8, 0.03, 0.08, 0.0008, 0.003, 0.004, 0.0004)
WEIGHT_SDS = (0.4, 1.2, 0.8, 1.2, 1.5, 1.5, 1.5)
SLOPE, SLOPE_SD, SLOPE_RESEMBLANCE = 0.005, 1.6, 0.6
FIRST_SEGMENT, CONTEXT_UNIT = 8.0, 1024.0
HELD, HELD_DRAFT, FIXED = 5, 6, len(WEIGHTS)
# Log-sd of the time of a plain step once the first few were seen.
SCALE_SD = 0.3
# Log weights stay within e^+-60, and move by at most 1 in a Newton step, of which mostly one is enough.
LARGEST_LOG, NEWTON_STEPS = 60.0, 12
# A prior that the data contradict pulls less: as if weights had Student's distribution with so many degrees of freedom.
PRIOR_TAIL = 4.0


def features(
    rows: np.ndarray,
    passes: np.ndarray,
    drafted: np.ndarray,
    verified: np.ndarray,
    context: FloatArray,
    knots: FloatArray,
) -> FloatArray:
    """Features [n, 7 + knots] of n steps: rows, draft passes, rows summed over these, verified tokens, tokens held a row."""
    out = np.empty((len(rows), FIXED + len(knots)))
    held = rows * context / CONTEXT_UNIT
    out[:, 0] = 1.0
    out[:, 1] = passes > 0
    out[:, 2], out[:, 3], out[:, 4] = passes, drafted, rows
    out[:, HELD], out[:, HELD_DRAFT] = held, held * passes
    np.clip(verified[:, None] - knots, 0.0, np.append(np.diff(knots), np.inf), out=out[:, FIXED:])
    return out


def of_length(batch: np.ndarray, length: np.ndarray, context: FloatArray, knots: FloatArray) -> FloatArray:
    """Features of steps in which every row drafts `length` tokens; rows with unlike plans have other sums."""
    return features(batch, length, length * batch, (length + 1) * batch, context, knots)


def knots_to(verified: float) -> FloatArray:
    """Where segments of verified tokens begin: 0, 8, 16, 32, ... up to half of the most there can be."""
    knots = [0.0, FIRST_SEGMENT]
    while knots[-1] * 4.0 <= verified:
        knots.append(knots[-1] * 2.0)
    return np.array(knots)


def prior(num_knots: int) -> tuple[FloatArray, FloatArray]:
    """Mean [d] and covariance [d, d] of the log weights, for a plain step that takes 1."""
    mean = np.log(np.append(WEIGHTS, np.full(num_knots, SLOPE)))
    covariance = np.zeros((len(mean), len(mean)))
    covariance[range(FIXED), range(FIXED)] = np.square(WEIGHT_SDS)
    distance = np.abs(np.arange(num_knots)[:, None] - np.arange(num_knots))
    covariance[FIXED:, FIXED:] = SLOPE_SD**2 * SLOPE_RESEMBLANCE**distance
    return mean, covariance + SCALE_SD**2


def bounded(covariance: FloatArray, num_knots: int) -> FloatArray:
    """The same with no weight less known than before anything was seen."""
    most = prior(num_knots)[1].diagonal()
    shrink = np.sqrt(np.minimum(1.0, 1.5 * most / covariance.diagonal()))
    return covariance * np.outer(shrink, shrink)


def most_probable(
    mean: FloatArray, covariance: FloatArray, rows: FloatArray, log_s: FloatArray, sd2: FloatArray, start: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Log weights most probable given a normal prior and log times of variances sd2, and their covariance.

    Newton's method (Gauss and Newton's). A time far from the surface loses weight, as if errors had Student's distribution
    with 4 degrees of freedom: cliffs are for the cells to know. How far is far is judged by the doubt of the prior, too.
    The result is the inverse of a sum of positive matrices: no variance can become negative.
    """
    phi, precision = start, np.linalg.inv(covariance)
    for _ in range(NEWTON_STEPS):
        parts = rows * np.exp(phi)
        smooth = parts.sum(axis=1)
        shares = parts / smooth[:, None]
        error = log_s - np.log(smooth)
        own = sd2 / (sd2 + np.einsum("nd,nd->n", shares @ covariance, shares))
        weighted = shares.T / (sd2 + 0.25 * own * error * error)
        moved = mean - phi
        pull = precision * min(1.0, (PRIOR_TAIL + len(phi)) / (PRIOR_TAIL + float(moved @ precision @ moved)))
        information = pull + weighted @ shares
        step = np.clip(np.linalg.solve(information, weighted @ error + pull @ moved), -1.0, 1.0)
        phi = np.clip(phi + step, -LARGEST_LOG, LARGEST_LOG)
        if np.abs(step).max() < 0.03:
            break
    return phi, np.linalg.inv(information)
