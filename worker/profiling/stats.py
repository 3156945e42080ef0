"""Arithmetic of an offline profile: from single steps to cells, survival and the effect of context length.

Pure functions of numpy; no engine, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A step this many robust deviations from its cell's median is an outlier, as by a pause of the machine.
OUTLIER_DEVIATIONS = 6.0
# Least deviation, as a share of the median, so that a very steady cell does not lose usable samples.
LEAST_DEVIATION = 0.02
# Relative standard deviation of a step that is assumed for cells with few steps.
ASSUMED_DEVIATION = 0.1

Key = tuple[int, int]  # batch size, speculation length


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """Mean whole-step time at one batch size and length, moved to the profile's reference context length.

    step_s_stderr: standard error of step_s. num_steps: steps behind it, of num_visits visits; num_outliers: left out
    besides.
    """

    batch_size: int
    speculation_length: int
    step_s: float
    step_s_stderr: float
    num_steps: int
    num_outliers: int
    mean_context_length: float
    num_visits: int = 0

    @property
    def relative_error(self) -> float:
        """Half of the 95% interval, as a share of the mean."""
        return 1.96 * self.step_s_stderr / self.step_s


def robust_mean(values: np.ndarray, visits: np.ndarray) -> tuple[float, float, int]:
    """Mean without outliers, its standard error, and how many values were outliers. values, visits: [n], n >= 1.

    Outliers are farther than 6 scaled median absolute deviations from the median. With fewer than four values there are
    none, and the standard error is 10% of the mean per step. visits: of each value; steps of one visit are correlated, as
    they share rows and machine state (Liang and Zeger 1986, the sandwich estimator for clusters).
    """
    if len(values) < 4:
        mean = float(np.median(values)) if len(values) > 2 else float(np.min(values))
        return mean, ASSUMED_DEVIATION * mean / np.sqrt(len(values)), 0
    inside = _inside(values)
    kept = values[inside]
    spread = max(float(kept.std(ddof=1)), LEAST_DEVIATION * float(np.median(values)) / 2)
    error = max(spread / np.sqrt(len(kept)), error_by_visits(kept, visits[inside]))
    return float(kept.mean()), error, len(values) - len(kept)


def error_by_visits(values: np.ndarray, visits: np.ndarray) -> float:
    """Standard error of the mean between visits; 0 for a single visit. Both [n]."""
    _, of_value = np.unique(visits, return_inverse=True)
    number = int(of_value.max()) + 1
    if number < 2:
        return 0.0
    sums = np.bincount(of_value, weights=values - values.mean())
    return float(np.sqrt(number / (number - 1) * (sums @ sums)) / len(values))


def context_slope(samples: Mapping[Key, np.ndarray]) -> float:
    """Seconds that one more token held by one sequence adds to a step; at least 0.

    samples: per cell [n, 3] of latency_s, mean context length and visit. Least squares over all cells at once, each with its
    own level: latency = level(cell) + slope * batch_size * context. Outliers are left out first.
    """
    numerator = denominator = 0.0
    for (batch_size, _), values in samples.items():
        kept = values[_inside(values[:, 0])]
        if len(kept) < 2:
            continue
        latency, tokens = kept[:, 0], batch_size * kept[:, 1]
        # Relative errors are similar between cells, so each is weighted by its inverse squared level.
        weight = 1.0 / np.median(latency) ** 2
        centred = tokens - tokens.mean()
        numerator += weight * float(centred @ (latency - latency.mean()))
        denominator += weight * float(centred @ centred)
    return max(0.0, float(numerator / denominator)) if denominator > 0 else 0.0


def _inside(values: np.ndarray) -> np.ndarray:
    """Mask of the values that are no outliers, [n]."""
    median = np.median(values)
    deviation = max(1.4826 * np.median(np.abs(values - median)), LEAST_DEVIATION * median)
    inside: np.ndarray = np.abs(values - median) <= OUTLIER_DEVIATIONS * deviation
    return inside


def measured_cells(samples: Mapping[Key, np.ndarray], slope: float, reference_context: float) -> list[MeasuredCell]:
    """One cell per key with samples, ordered by batch size and length, all at the reference context length."""
    cells = []
    for (batch_size, length), values in sorted(samples.items()):
        if not len(values):
            continue
        moved = values[:, 0] + slope * batch_size * (reference_context - values[:, 1])
        # Bounded below, where contexts differ a lot.
        mean, stderr, outliers = robust_mean(np.maximum(moved, 0.1 * values[:, 0]), values[:, 2])
        counts = len(values) - outliers, outliers, reference_context, len(np.unique(values[:, 2]))
        cells.append(MeasuredCell(batch_size, length, mean, float(stderr), *counts))
    return cells


def reference_context(samples: Mapping[Key, np.ndarray]) -> float:
    """Mean context length over all steps, in whole tokens."""
    contexts = [values[:, 1] for values in samples.values() if len(values)]
    return float(round(np.concatenate(contexts).mean())) if contexts else 0.0


def survival(histograms: Mapping[int, Sequence[int]]) -> tuple[list[float], list[int]]:
    """Survival by draft position, and the sequences that reached each position, from accepted runs at any lengths.

    histograms[s][j]: sequences that accepted exactly j of s draft tokens. A run of s is censored there. Kaplan-Meier:
    survival[i] is the product of the acceptance rates of positions 0..i. A position that no sequence reached takes the rate
    of the one before; its count is 0.
    """
    longest = max(histograms, default=0)
    reached, accepted = np.zeros(longest, dtype=int), np.zeros(longest, dtype=int)
    for length, histogram in histograms.items():
        at_least = np.cumsum(np.asarray(histogram)[::-1])[::-1]  # at_least[j]: sequences with j or more
        reached[:length] += at_least[:length]
        accepted[:length] += at_least[1 : length + 1]
    shares: list[float] = []
    for count, rows in zip(accepted, reached, strict=True):
        shares.append(count / rows if rows else shares[-1] if shares else 0.0)
    return [float(value) for value in np.cumprod(shares)], [int(value) for value in reached]


def expected_tokens_error(histogram: Sequence[int]) -> float:
    """Half of the 95% interval of the tokens per sequence and step, as a share of them; infinite without any.

    histogram[j]: sequences that accepted exactly j draft tokens, all at one length. The bonus token is counted.
    """
    counts = np.asarray(histogram, dtype=float)
    rows = counts.sum()
    if rows < 2:
        return float("inf")
    tokens = np.arange(len(counts)) + 1.0
    mean = counts @ tokens / rows
    deviation = np.sqrt(counts @ (tokens - mean) ** 2 / (rows - 1))
    return float(1.96 * deviation / np.sqrt(rows) / mean)
