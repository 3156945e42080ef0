"""Tokens per step of draft-model arms, from the accepted runs of all of them, without step times.

Outputs do not depend on what is drafted, so a run of accepted tokens tells of every shorter length. One pool serves one
range of batch sizes of a context, with exponential forgetting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from speclen.records import MAX_SPECULATION_LENGTH, Arm

MEMORY = 20_000.0  # observed sequences
ALIKE = 4.0  # observations that are worth one independent one: steps of a request accept alike


class Acceptance:
    """Sequences that reached and passed each draft position."""

    def __init__(self) -> None:
        self._reached = np.zeros(MAX_SPECULATION_LENGTH)
        self._passed = np.zeros(MAX_SPECULATION_LENGTH)

    def add(self, length: int, histogram: Sequence[int]) -> None:
        """Learn from steps that drafted this many tokens. histogram[j]: sequences that accepted exactly j of them."""
        remaining = np.cumsum(histogram[::-1])[::-1]  # sequences that accepted at least j tokens
        keep = 1.0 - min(remaining[0] / MEMORY, 0.5)
        self._reached *= keep
        self._passed *= keep
        self._reached[:length] += remaining[:length]
        self._passed[:length] += remaining[1 : length + 1]

    def log_ratio(self, arm: Arm, other: Arm) -> tuple[float, float] | None:
        """Log of (tokens per step of an arm / of another), and its standard error; None where the pool does not tell it."""
        longest = max(arm.speculation_length, other.speculation_length)
        if arm.ngram or other.ngram or (self._reached[:longest] < 8 * ALIKE).any():
            return None
        chance = (self._passed[:longest] + 0.5) / (self._reached[:longest] + 1.0)
        relative = ALIKE * (1.0 - chance) / (chance * self._reached[:longest])  # variance of log chance
        survival = np.cumprod(chance)

        def tokens(length: int) -> tuple[float, np.ndarray]:
            expected = 1.0 + float(survival[:length].sum())
            slope = np.zeros(longest)  # of log tokens by log chance
            slope[:length] = survival[:length][::-1].cumsum()[::-1] / expected
            return expected, slope

        (mine, slope), (its, its_slope) = tokens(arm.speculation_length), tokens(other.speculation_length)
        return math.log(mine / its), math.sqrt(float((slope - its_slope) ** 2 @ relative))
