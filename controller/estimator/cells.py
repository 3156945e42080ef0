"""Cells that have evidence: (range of batch sizes, arm)."""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.step_time import MOST_CELLS

Array = np.ndarray


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
