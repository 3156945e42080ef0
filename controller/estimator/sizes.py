"""Ranges of batch sizes, and cells (range, arm) that have evidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray

GROWTH = 0.12  # width of a range relative to its first size: up to 16 each size is one
MOST_CELLS = 192  # of one context; those with the least evidence are forgotten beyond it


class Ranges(NamedTuple):
    """low, high: first and last batch size of each range; of: the range of every batch size up to the largest."""

    low: np.ndarray
    high: np.ndarray
    of: np.ndarray


def ranges_to(max_batch_size: int) -> Ranges:
    """1, 2, 3, ..., then ranges that grow."""
    low = [1]
    while (following := low[-1] + max(1, int(low[-1] * GROWTH))) <= max_batch_size:
        low.append(following)
    high = [*(each - 1 for each in low[1:]), max_batch_size]
    of = np.searchsorted(low, np.arange(max_batch_size + 1), side="right") - 1
    of[0] = 0
    return Ranges(np.array(low), np.array(high), of)


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
