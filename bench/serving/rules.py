"""How others choose the length, for comparison: as they describe it, on this engine."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from speclen.worker.engine.length_chooser import LengthChoice, StepResult

EMA = 0.1  # weight of a step in the running acceptance of a position
MARGIN = 1.05  # another length must promise so many times the tokens before it is used
EVERY_STEPS = 16  # between decisions


class ThroughputAware:
    """After the policy that is proposed for SGLang (pull request 28045): costs from start-up, acceptance from serving.

    What a step takes is measured once, before serving, per batch size and length; how far drafts are accepted is a running
    mean per position. The length with the most expected tokens per time is used, once it is ahead by a margin. 0 is not
    among them, since speculation cannot be switched off there.
    """

    def __init__(self, costs: Mapping[tuple[int, int], float], survival: Sequence[float], max_length: int) -> None:
        """costs: seconds of a step by batch size and length; survival: what acceptance starts from, by position."""
        self._sizes = sorted({size for size, _ in costs})
        self._lengths = [n for n in range(1, max_length + 1) if all((size, n) in costs for size in self._sizes)]
        if not self._lengths:
            raise ValueError("the profile has no length that was measured at every batch size")
        self._costs = np.array([[costs[size, n] for n in self._lengths] for size in self._sizes])
        given = np.array([*survival, *[0.0] * max_length][:max_length], dtype=float)
        before = np.concatenate([[1.0], given[:-1]])
        self._acceptance = np.divide(given, before, out=np.zeros_like(given), where=before > 0)
        self._chosen: dict[int, int] = {}
        self._num_steps = 0

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        """As LengthChooser."""
        if batch_size not in self._chosen:
            self._chosen[batch_size] = self.best_length(batch_size)
        return LengthChoice(self._chosen[batch_size])

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        """As LengthChooser."""
        histogram = np.array(result.accepted_histogram)
        reached = np.cumsum(histogram[::-1])[::-1]  # rows whose accepted run was j or longer
        for position in range(result.speculation_length):
            if reached[position]:
                share = reached[position + 1] / reached[position]
                self._acceptance[position] += EMA * (share - self._acceptance[position])
        self._num_steps += 1
        if self._num_steps % EVERY_STEPS == 0:
            self._chosen = {size: self._reconsidered(size, length) for size, length in self._chosen.items()}

    def best_length(self, batch_size: int) -> int:
        """The length with the most expected tokens per second."""
        return self._lengths[int(np.argmax(self._rates(batch_size)))]

    def _reconsidered(self, batch_size: int, length: int) -> int:
        rates, best = self._rates(batch_size), self.best_length(batch_size)
        ahead = rates[self._lengths.index(best)] / rates[self._lengths.index(length)]
        return best if ahead > MARGIN else length

    def _rates(self, batch_size: int) -> np.ndarray:
        """Expected tokens per row and second of every length."""
        expected = 1.0 + np.cumsum(np.cumprod(self._acceptance))
        return expected[np.array(self._lengths) - 1] / self._cost(batch_size)

    def _cost(self, batch_size: int) -> np.ndarray:
        """Seconds of a step of every length; between measured batch sizes on a straight line."""
        place = min(max(bisect.bisect_left(self._sizes, batch_size), 1), len(self._sizes) - 1)
        if len(self._sizes) == 1:
            return self._costs[0]
        low, high = self._sizes[place - 1], self._sizes[place]
        share = min(max((batch_size - low) / (high - low), 0.0), 1.0)
        return np.asarray((1 - share) * self._costs[place - 1] + share * self._costs[place])
