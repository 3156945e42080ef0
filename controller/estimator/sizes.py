"""Ranges of batch sizes, and cells (range, arm) that have evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator import settings
from speclen.controller.estimator.features import NUM_FEATURES
from speclen.controller.estimator.saving import Array
from speclen.records import Arm, Limits


class Grid(NamedTuple):
    """Cells of a context by number: (range of batch sizes, n-grams or not, length). The last two are the arm's place.

    low, high: first and last batch size of each range; range_of: every batch size's range; num_lengths: 0 to the largest.
    """

    low: np.ndarray
    high: np.ndarray
    range_of: np.ndarray
    num_lengths: int

    @classmethod
    def of(cls, limits: Limits) -> Grid:
        """Ranges 1, 2, 3, ..., then ranges that grow: those of larger limits begin with the same ones."""
        low = [1]
        while (following := low[-1] + max(1, int(low[-1] * settings.current.growth))) <= limits.max_batch_size:
            low.append(following)
        high = [*(each - 1 for each in low[1:]), limits.max_batch_size]
        range_of = np.searchsorted(low, np.arange(limits.max_batch_size + 1), side="right") - 1
        range_of[0] = 0
        return cls(np.array(low), np.array(high), range_of, limits.max_speculation_length + 1)

    @property
    def sizes(self) -> np.ndarray:
        """A batch size of each range."""
        return (self.low + self.high) // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """[ranges, 2, lengths], of values of all cells."""
        return (len(self.low), 2, self.num_lengths)

    def arm(self, place: int) -> Arm:
        """The arm at a place."""
        ngram, length = divmod(place, self.num_lengths)
        return Arm(length, bool(ngram))

    def place(self, arm: Arm) -> int:
        """The place of an arm."""
        return int(arm.ngram) * self.num_lengths + arm.speculation_length

    def cells_at(self, batch: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Number of the cell of each step, [n]. batch: sizes, place: of the arms, [n] each."""
        cells: np.ndarray = self.range_of[batch] * 2 * self.num_lengths + place
        return cells


def moved(places: np.ndarray, old: int, new: int) -> np.ndarray:
    """Places of arms, or numbers of cells, after the number of lengths has changed from `old` to `new`."""
    kind, length = np.divmod(places, old)
    result: np.ndarray = kind * new + length
    return result


@dataclass(eq=False)
class Cells:
    """Cells with evidence. numbers: see `Grid`; features: of the first step in each, [cells, NUM_FEATURES]."""

    numbers: Array = field(default_factory=lambda: np.zeros(0, int))
    features: Array = field(default_factory=lambda: np.zeros((0, NUM_FEATURES)))

    def __post_init__(self) -> None:
        self._place = {number: at for at, number in enumerate(self.numbers.tolist())}

    def places(self, numbers: np.ndarray, features: np.ndarray) -> np.ndarray:
        """Places of the steps' cells among those known, made where they are new. features: of the steps."""
        listed, known = numbers.tolist(), self._place
        for number in dict.fromkeys(listed):
            if number not in known:
                known[number] = len(known)
                self.numbers = np.append(self.numbers, number)
                self.features = np.vstack([self.features, features[listed.index(number)]])
        return np.array([known[number] for number in listed])

    def renumbered(self, old: int, new: int) -> Cells:
        """The same, after the number of lengths has changed."""
        return Cells(moved(self.numbers, old, new), self.features)

    def kept(self, count: np.ndarray) -> np.ndarray | None:
        """Places of the cells to keep, ascending; None where there are not too many. count: samples of each."""
        if len(self.numbers) <= settings.current.most_cells:
            return None
        places: np.ndarray = np.sort(np.argsort(-count)[: settings.current.most_cells * 3 // 4])
        return places
