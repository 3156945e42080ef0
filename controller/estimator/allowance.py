"""How much of what a worker says of itself is believed, where nothing it does could contradict it."""

from __future__ import annotations

import math

REMEMBERED = 256  # workers; another begins with what is allowed at once


class Allowance:
    """Every worker may be counted for what it has earned, and for so much at once that it has not. left: by worker."""

    STATE = ("left",)

    def __init__(self, at_once: float) -> None:
        self.at_once = at_once
        self.left: dict[str, float] = {}

    @property
    def sound(self) -> bool:
        """Whether the numbers are some."""
        return all(map(math.isfinite, self.left.values()))

    def take(self, worker: str, earned: float, asked: float) -> float:
        """How much of what is asked for counts, now that the worker has earned so much more."""
        left = self.left.pop(worker, self.at_once) + earned
        taken = min(asked, left)
        self.left[worker] = min(left - taken, self.at_once)
        if len(self.left) > REMEMBERED:
            del self.left[next(iter(self.left))]
        return taken
