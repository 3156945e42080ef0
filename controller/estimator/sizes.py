"""Ranges of batch sizes: one choice each, and coarser ones for the residuals of step times."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SINGLE_CHOICES, CHOICE_GROWTH = 64, 0.05  # up to so many each size has a choice of its own; then ranges of 5%
SINGLE_CELLS, CELL_GROWTH = 8, 0.12  # the same for residuals, which neighbouring sizes share


class Ranges(NamedTuple):
    """low, high: first and last batch size of each range; of: the range of every batch size up to the largest."""

    low: np.ndarray
    high: np.ndarray
    of: np.ndarray


def ranges(max_batch_size: int, single: int, growth: float) -> Ranges:
    """1, 2, 3, ... up to `single`, then ranges that grow."""
    low = [1]
    while (following := low[-1] + (1 if low[-1] < single else max(1, int(low[-1] * growth)))) <= max_batch_size:
        low.append(following)
    high = [*(each - 1 for each in low[1:]), max_batch_size]
    of = np.searchsorted(low, np.arange(max_batch_size + 1), side="right") - 1
    of[0] = 0
    return Ranges(np.array(low), np.array(high), of)


def choice_ranges(max_batch_size: int) -> Ranges:
    """Ranges with one choice each."""
    return ranges(max_batch_size, SINGLE_CHOICES, CHOICE_GROWTH)


def cell_ranges(max_batch_size: int) -> Ranges:
    """Ranges with one residual for each arm."""
    return ranges(max_batch_size, SINGLE_CELLS, CELL_GROWTH)
