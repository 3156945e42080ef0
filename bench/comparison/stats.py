"""Ratios of policies over paired blocks, with their intervals.

Requests that arrive close together wait in the same queue, so single requests are no independent samples. Blocks are: each
begins with an idle worker, and both policies of a ratio serve the same ones within the same minute or two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_DRAWS = 2000
CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964
LEAST_BLOCKS = 6  # below it an interval is shown and called too short


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% confidence interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Of the ratio, relative: 0.03 for 3%."""
        return math.sqrt(self.high / self.low) - 1.0


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """sum(numerators) / sum(denominators) over paired blocks, with a bootstrap interval over blocks.

    Few blocks underestimate their own spread: the deviations of the draws are widened by sqrt(n / (n - 1)) and by what
    Student's quantile has over the normal one. One block has no width. Raises ValueError when there is nothing.
    """
    if not numerators or not sum(denominators):
        raise ValueError("no blocks to compare")
    above, below = np.array(numerators, float), np.array(denominators, float)
    number = len(above)
    value = math.log(above.sum() / below.sum())
    if number == 1:
        return Interval(*[math.exp(value)] * 3)
    picks = np.random.default_rng(seed).integers(number, size=(NUM_DRAWS, number))
    draws = np.log(above[picks].sum(axis=1) / below[picks].sum(axis=1)) - value
    widening = math.sqrt(number / (number - 1)) * student_quantile(number - 1) / NORMAL_QUANTILE
    low, high = value + widening * np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(math.exp(value), math.exp(low), math.exp(high))


def student_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution, within 1% (Cornish and Fisher)."""
    if freedom in (exact := {1: 12.706, 2: 4.303}):
        return exact[freedom]
    z, v = NORMAL_QUANTILE, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
