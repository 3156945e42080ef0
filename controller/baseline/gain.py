"""The gain of learned arms over the baseline, from trials, with an interval.

A trial is a block of steps on one arm between blocks of another arm. Its time ratio is what the wall clock said. The ratio
of accepted tokens is that of sums over the steps since the trial before.
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
LEAST_ALIKE, MAX_ALIKE = 3, 0.8  # trials that tell no correlation of neighbours; the largest correlation
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


def clipped(values: np.ndarray) -> tuple[np.ndarray, float]:
    """Values within CLIP robust standard deviations of their median, and the share that was (Huber 1964).

    Where the machine's speed jumps in the middle of a trial the value is far off, to either side alike.
    """
    middle = np.median(values)
    spread = CLIP * 1.4826 * np.median(np.abs(values - middle))
    if len(values) < LEAST_CLIPPED or not spread:
        return values, 1.0
    return np.clip(values, middle - spread, middle + spread), float(np.mean(np.abs(values - middle) < spread))


def gain_of(trials: Sequence[Trial], weights: Sequence[float]) -> Gain:
    """The gain over weighted trials, at least one.

    The standard error is that of a weighted mean of the trials' influences: each trial is one cluster, so steps that are
    alike within it count once. For tokens that is the linearised ratio of sums (Cochran 1977, chapter 6). Trials that follow
    each other closely see the same requests, so the correlation of neighbours widens it.
    """
    weight = np.array(weights) / np.sum(weights)
    time, within = clipped(np.array([trial.log_time for trial in trials]))
    sums = np.array([[t.learned_tokens, t.learned_sequences, t.baseline_tokens, t.baseline_sequences] for t in trials])
    total = weight @ sums
    relative = sums / total
    log_tokens = math.log(total[0] / total[1]) - math.log(total[2] / total[3])
    log_time = float(weight @ time)
    influence = relative @ np.array([1.0, -1.0, -1.0, 1.0]) - (time - log_time) / within
    num_trials = 1.0 / float(weight @ weight)
    spread = float(weight**2 @ influence**2) * num_trials / max(num_trials - 1.0, 1e-9)
    inflation = _inflation(influence)
    independent = max(num_trials / inflation, min(num_trials, 2.0))
    return Gain(log_tokens - log_time, math.sqrt(inflation * spread), num_trials, independent - 1.0)


def _inflation(influence: np.ndarray) -> float:
    """Variance of the mean of trials that are alike over that of independent ones, at least 1.

    The correlation of neighbours is estimated too low from few trials, by (1 + 3 rho) / n (Kendall 1954).
    """
    number, total = len(influence), float(influence @ influence)
    if number <= LEAST_ALIKE or not total:
        return 1.0
    rho = (number * float(influence[1:] @ influence[:-1]) / total + 1.0) / (number - 3.0)
    rho = min(max(rho, 0.0), MAX_ALIKE)
    return (1.0 + rho) / (1.0 - rho)
