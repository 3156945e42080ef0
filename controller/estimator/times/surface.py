"""A step's time as a smooth function of what the step does, positive and monotone by construction.

    m = sum_i exp(phi_i) f_i(rows, draft passes, rows in draft passes, verified tokens, held context)

Positive weights exp(phi_i) on features that grow. The gradient of log m in phi is a set of shares that sum to 1, so no
data can blow it up. Nothing here knows of lengths: a step in which rows differ in their plans has such sums, too.
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
# Log weights stay within e^+-60 and move by at most 1 in a Newton step. A fit begins at the last one, so it takes few steps:
# it ends when no time moves by more than the tolerance, in log, and what is left to do is done by the next one.
LARGEST_LOG, NEWTON_STEPS, TOLERANCE = 60.0, 6, 0.002


class Surface:
    """Weights of the features: the most probable ones given a prior and what was seen, and their covariance, in log."""

    STATE = ("phi0", "covariance0", "phi", "covariance")

    def __init__(self, most_verified: float) -> None:
        """most_verified: tokens in the largest step."""
        self.knots = knots_to(most_verified)
        self.widths = np.append(np.diff(self.knots), np.inf)
        self._inverse_of = self._inverse = np.zeros((0, 0))
        self.restart(*prior(len(self.knots)))

    def restart(self, phi: FloatArray, covariance: FloatArray) -> None:
        """Begin with a new prior, in which no weight is less known than before anything was seen."""
        most = prior(len(self.knots))[1].diagonal()
        shrink = np.sqrt(np.minimum(1.0, 1.5 * most / covariance.diagonal()))
        self.phi0 = self.phi = phi
        self.covariance0 = self.covariance = covariance * np.outer(shrink, shrink)

    def loosened(self, sd: float, common_sd: float) -> FloatArray:
        """Covariance if every weight may have moved by so much in log, and all of them together."""
        return self.covariance + sd**2 * np.eye(len(self.phi)) + common_sd**2

    def features(
        self,
        rows: np.ndarray,
        passes: np.ndarray,
        drafted: np.ndarray,
        verified: np.ndarray,
        context: np.ndarray,
    ) -> FloatArray:
        """Features [n, weights] of steps: rows, draft passes, rows summed over these, verified tokens, tokens held a row."""
        out = np.empty((len(rows), FIXED + len(self.knots)))
        held = rows * context / CONTEXT_UNIT
        out[:, 0] = 1.0
        out[:, 1] = passes > 0
        out[:, 2], out[:, 3], out[:, 4] = passes, drafted, rows
        out[:, HELD], out[:, HELD_DRAFT] = held, held * passes
        out[:, FIXED:] = np.minimum(np.maximum(verified[:, None] - self.knots, 0.0), self.widths)
        return out

    def of_length(self, batch: np.ndarray, length: np.ndarray, context: np.ndarray) -> FloatArray:
        """Features of steps in which every row drafts `length` tokens."""
        return self.features(batch, length, length * batch, (length + 1) * batch, context)

    def variance(self, shares: FloatArray) -> FloatArray:
        """Variance of log times whose gradient is given, [n, weights]."""
        return np.maximum(_quadratic(shares, self.covariance), 0.0)

    def _precision0(self) -> FloatArray:
        """The inverse of the prior's covariance, kept until there is another prior."""
        if self._inverse_of is not self.covariance0:
            self._inverse_of, self._inverse = self.covariance0, np.linalg.inv(self.covariance0)
        return self._inverse

    def fit(self, rows: FloatArray, log_s: FloatArray, sd2: FloatArray) -> None:
        """Find the weights most probable given the prior and log times of variances sd2. rows: features [n, weights].

        Newton's method (Gauss and Newton's). A time far from the surface loses weight, as if errors had Student's
        distribution with 4 degrees of freedom: cliffs are for the cells to know. How far is far is judged by the doubt of
        the prior, too. The result is the inverse of a sum of positive matrices: no variance can become negative.
        """
        precision = self._precision0()
        for number in range(NEWTON_STEPS):
            weights = np.exp(self.phi)
            smooth = rows @ weights
            shares = rows * (weights / smooth[:, None])
            error = log_s - np.log(smooth)
            if not number:
                far = 0.25 * sd2 / (sd2 + _quadratic(shares, self.covariance0))
            weighted = shares.T / (sd2 + far * error * error)
            self.covariance = np.linalg.inv(precision + weighted @ shares)
            step = self.covariance @ (weighted @ error + precision @ (self.phi0 - self.phi))
            step = np.minimum(np.maximum(step, -1.0), 1.0)
            self.phi = np.minimum(np.maximum(self.phi + step, -LARGEST_LOG), LARGEST_LOG)
            if np.maximum.reduce(np.abs(shares @ step)) < TOLERANCE:
                break


def _quadratic(rows: FloatArray, matrix: FloatArray) -> FloatArray:
    """row' matrix row of each row, [n]."""
    values: FloatArray = np.einsum("ij,ij->i", rows @ matrix, rows)
    return values


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
