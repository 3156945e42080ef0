"""Percentiles and confidence intervals of latencies that share a machine, a track and a queue.

Requests that arrive close together wait in the same queue, so they are no independent samples, and two runs of one
policy differ by what else the machine did. The bootstrap here therefore resamples whole repeats, and within each of
them whole stretches of time, the same ones for both sides of a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_DRAWS = 2000
NUM_STRETCHES = 20  # stretches of time per repeat: long against a queue, enough of them to resample
LEAST_REQUESTS = 100
LEAST_REPEATS = 3
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles, all in the unit of the values."""

    mean: float
    p50: float
    p95: float
    p99: float
    count: int


def distribution(values: Sequence[float]) -> Distribution | None:
    """None when there are no values."""
    if not len(values):
        return None
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return Distribution(float(np.mean(values)), float(p50), float(p95), float(p99), len(values))


def ratio_of_means(
    numerators: Sequence[np.ndarray],
    denominators: Sequence[np.ndarray],
    at_s: Sequence[np.ndarray],
    seed: int = 0,
) -> Interval:
    """Geometric mean over repeats of mean(numerator) / mean(denominator), with a bootstrap interval.

    numerators[r], denominators[r], at_s[r]: [requests] of repeat r, the same requests in the same order.
    Two levels: repeats are drawn with replacement, and within each drawn repeat stretches of time. The spread between
    few repeats underestimates by sqrt((n - 1) / n), which is made good. Raises ValueError when there is nothing.
    """
    if not numerators or any(len(values) == 0 for values in numerators):
        raise ValueError("no finished requests to compare")
    rng = np.random.default_rng(seed)
    logs = np.array([math.log(n.mean() / d.mean()) for n, d in zip(numerators, denominators, strict=True)])
    within = np.stack(
        [resampled_logs(rng, *values) for values in zip(numerators, denominators, at_s, strict=True)]
    )  # [repeats, draws]
    repeats = len(logs)
    picks = rng.integers(repeats, size=(repeats, NUM_DRAWS))
    inflate = math.sqrt(repeats / (repeats - 1)) if repeats > 1 else 0.0
    between = inflate * (logs[picks] - logs.mean()).mean(axis=0)
    noise = (within - logs[:, None])[picks, np.arange(NUM_DRAWS)].mean(axis=0)
    draws = logs.mean() + between + noise
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(*(float(math.exp(value)) for value in (logs.mean(), low, high)))


def resampled_logs(
    rng: np.random.Generator, numerator: np.ndarray, denominator: np.ndarray, at_s: np.ndarray
) -> np.ndarray:
    """log of the ratio of means under NUM_DRAWS resamplings of stretches of time. Result: [draws]."""
    edges = np.linspace(at_s.min(), at_s.max(), NUM_STRETCHES + 1)[1:-1]
    stretch = np.searchsorted(edges, at_s, side="right")
    sums = np.stack([np.bincount(stretch, values, NUM_STRETCHES) for values in (numerator, denominator)])
    used = np.flatnonzero(np.bincount(stretch, minlength=NUM_STRETCHES))
    picks = rng.choice(used, size=(NUM_DRAWS, len(used)))
    totals = sums[:, picks].sum(axis=2)  # [2, draws]
    return np.asarray(np.log(totals[0] / totals[1]))


def too_short(num_requests: int, num_repeats: int) -> str:
    """Why intervals from so little say less than they seem to; empty when there is enough."""
    reasons = []
    if num_requests < LEAST_REQUESTS:
        reasons.append(f"{num_requests} counted requests a run, fewer than {LEAST_REQUESTS}")
    if num_repeats < LEAST_REPEATS:
        reasons.append(f"{num_repeats} repeat{'s' if num_repeats > 1 else ''}, fewer than {LEAST_REPEATS}")
    return "too short for its intervals: " + " and ".join(reasons) if reasons else ""
