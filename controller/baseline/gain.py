"""The gain of learned arms over the baseline, from trials, with an interval.

A trial is a block of steps on one arm beside the blocks of another before and after it. Its time ratio is what the wall
clock said. Accepted tokens vary far more than times: where both arms draft without n-grams, their ratio comes from the
survival of all draft tokens at these batch sizes, and elsewhere from the sums over the trials themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from speclen.records import Trial

CLIP = 2.0
MAX_HALF = 100.0  # of the log ratio: beyond, nothing is known
MAX_LAG = 12  # trials between two that may be alike
LEAST_CLIPPED = 6  # values below which the robust deviation says little


class Gain(NamedTuple):
    """log_ratio: log of (tokens per second of the learned arms / of the baseline).

    num_trials: effective number. freedom: degrees of freedom of the standard error, fewer where trials are alike.
    """

    log_ratio: float
    stderr: float
    num_trials: float
    freedom: float

    @property
    def ratio(self) -> float:
        """Tokens per second of the learned arms over those of the baseline."""
        return math.exp(self.log_ratio)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Bounds of the ratio; (0, inf) while a single trial or none is known."""
        half = half_width(self, 0.5 + confidence / 2)
        if half > MAX_HALF:
            return 0.0, math.inf
        return math.exp(self.log_ratio - half), math.exp(self.log_ratio + half)


def half_width(gain: Gain, quantile: float) -> float:
    """The standard error times the quantile of Student's distribution for this number of trials."""
    return gain.stderr * t_quantile(quantile, gain.freedom) if gain.freedom >= 1.0 else math.inf


def t_quantile(quantile: float, freedom: float) -> float:
    """Quantile of Student's distribution; within 1% from 4 degrees of freedom (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(quantile)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def clipped(values: np.ndarray) -> np.ndarray:
    """Values within CLIP robust standard deviations of their median.

    Where the machine's speed jumps in the middle of a trial the value is far off, to either side alike.
    """
    middle = np.median(values)
    spread = CLIP * 1.4826 * np.median(np.abs(values - middle))
    return np.clip(values, middle - spread, middle + spread) if len(values) >= LEAST_CLIPPED else values


def gain_of(trials: Sequence[Trial], weights: Sequence[float]) -> Gain | None:
    """The gain over weighted trials; None without any.

    The standard error is that of a weighted mean of the trials' influences: each trial is one cluster, so steps that are
    alike within it count once. For tokens that is the linearised ratio of sums (Cochran 1977, chapter 6). Trials that follow
    each other closely see the same requests, so the correlation of neighbours widens it.
    """
    if not trials:
        return None
    weight = np.array(weights) / np.sum(weights)
    time = clipped(np.array([trial.log_time for trial in trials]))
    pooled = np.array([trial.log_tokens is not None for trial in trials])
    tokens, influence = np.zeros(2), np.zeros(len(trials))
    known = np.array([trial.log_tokens or 0.0 for trial in trials])
    sums = np.array([[t.learned_tokens, t.learned_sequences, t.baseline_tokens, t.baseline_sequences] for t in trials])
    own = weight * ~pooled
    if own.any():
        total = own @ sums
        tokens[0] = math.log(total[0] / total[1]) - math.log(total[2] / total[3])
        relative = sums * own.sum() / total
        influence = ~pooled * (relative[:, 0] - relative[:, 1] - relative[:, 2] + relative[:, 3])
    log_tokens = own.sum() * tokens[0] + (weight * pooled) @ known
    log_time = float(weight @ time)
    influence = influence + pooled * (known - (known[pooled].mean() if pooled.any() else 0.0)) - (time - log_time)
    num_trials = 1.0 / float(weight @ weight)
    spread = float(weight**2 @ influence**2) * num_trials / max(num_trials - 1.0, 1e-9)
    inflation = _inflation(influence)
    common = float((weight * pooled) @ np.array([trial.log_tokens_stderr for trial in trials]))
    stderr = math.sqrt(inflation * spread + common**2)
    return Gain(float(log_tokens) - log_time, stderr, num_trials, num_trials / inflation - 1.0)


def _inflation(influence: np.ndarray) -> float:
    """Variance of a mean of neighbours that are alike over that of independent ones, at least 1 (Newey and West 1987)."""
    total, lags = float(influence @ influence), min(len(influence) // 4, MAX_LAG)
    if not total:
        return 1.0
    alike = (influence[lag:] @ influence[:-lag] * (1.0 - lag / (lags + 1)) for lag in range(1, lags + 1))
    return max(1.0, 1.0 + 2.0 * sum(map(float, alike)) / total)
