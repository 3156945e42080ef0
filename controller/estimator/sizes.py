"""Ranges of batch sizes with one choice each, coarser ones for residuals of step times, and cells that have evidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray

SINGLE_CHOICES, CHOICE_GROWTH = 64, 0.05  # up to so many each size has a choice of its own; then ranges of 5%
MOST_CELLS = 192  # of one context; those with the least evidence are forgotten beyond it
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


class Cells:
    """numbers: of each cell, see `Grid.cells_at`; features: of the first step in it, [cells, p]."""

    STATE = ("numbers", "features")

    def __init__(self, num_features: int) -> None:
        self.numbers, self.features = np.zeros(0, int), np.zeros((0, num_features))
        self._place: dict[int, int] = {}

    def places(self, numbers: Array, features: Array) -> Array:
        """Places of the steps' cells among those known, made where they are new. features: of the steps."""
        if len(self._place) != len(self.numbers):
            self._place = {number: at for at, number in enumerate(self.numbers.tolist())}
        listed, known = numbers.tolist(), self._place
        for number in dict.fromkeys(listed):
            if number not in known:
                known[number] = len(known)
                self.numbers = np.append(self.numbers, number)
                self.features = np.vstack([self.features, features[listed.index(number)]])
        return np.array([known[number] for number in listed])

    def to_keep(self, count: Array) -> Array | None:
        """Places of the cells to keep, ascending; None where there are not too many. count: samples of each."""
        if len(self.numbers) <= MOST_CELLS:
            return None
        kept: Array = np.sort(np.argsort(-count)[: MOST_CELLS * 3 // 4])
        return kept

    def keep(self, kept: Array) -> Array:
        """Forget the others; returns the new place of each, -1 for those forgotten."""
        place = np.full(len(self.numbers), -1)
        place[kept] = np.arange(len(kept))
        self.numbers, self.features, self._place = self.numbers[kept], self.features[kept], {}
        return place
