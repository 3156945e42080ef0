"""The best length for the requests that are in a step: greedy, cool and hot ones accept unlike."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from speclen.v1 import control_pb2 as pb
from speclen.worker.drafting.plan import MAX_DRAFTED

# Batches by composition whose length is remembered.
MOST_REMEMBERED = 4096


@dataclass(slots=True)
class LengthMix:
    """Numbers of the controller. step_s: [buckets, lengths]; tokens: [classes, buckets, lengths], per row, bonus included.

    One thread, the engine's, asks; what it found for a composition it finds again in a dictionary.
    """

    bucket_ends: tuple[int, ...]
    step_s: np.ndarray
    tokens: np.ndarray
    found: dict[tuple[int, ...], int] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: pb.LengthMix) -> LengthMix:
        """Raises ValueError where the numbers do not fit together or are none."""
        ends, lengths = tuple(message.bucket_ends), message.num_lengths
        if lengths > MAX_DRAFTED + 1:
            raise ValueError(
                f"the mix of the length table has {lengths} lengths, at most {MAX_DRAFTED + 1} are possible"
            )
        step_s = np.array(message.step_s).reshape(len(ends), lengths)
        tokens = np.array(message.tokens).reshape(-1, len(ends), lengths)
        if not ends or not lengths or not len(tokens):
            raise ValueError("the mix of the length table is empty")
        if not (np.isfinite(step_s).all() and (step_s > 0.0).all() and np.isfinite(tokens).all()):
            raise ValueError("the mix of the length table has numbers that are none")
        return cls(ends, step_s, tokens)

    def length_for(self, rows_by_class: tuple[int, ...]) -> int:
        """The length with the most expected tokens per second for so many rows of each class."""
        length = self.found.get(rows_by_class)
        if length is None:
            if len(self.found) >= MOST_REMEMBERED:
                self.found.clear()
            length = self.found[rows_by_class] = self._best(rows_by_class)
        return length

    def _best(self, rows_by_class: tuple[int, ...]) -> int:
        bucket = min(bisect_left(self.bucket_ends, sum(rows_by_class)), len(self.bucket_ends) - 1)
        known = rows_by_class[: len(self.tokens)]
        tokens = np.array(known, dtype=float) @ self.tokens[: len(known), bucket]
        return int((tokens / self.step_s[bucket]).argmax())
