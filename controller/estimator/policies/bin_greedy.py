"""Nightjar's rule as its paper describes it (arXiv 2512.22420): per batch size, space locked in bins.

Block j of a bucket has 2**j bins of 2**j steps. The b-th bin of a block explores with probability 1 / sqrt(b): one random
length for the whole bin; otherwise the length with the least mean time per token is kept for the whole bin.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.policies.cells import CellPolicy
from speclen.controller.estimator.policies.policy import Space


class BinGreedyPolicy(CellPolicy):
    """bins: by bucket [block, bin in block (from 1), steps left in the bin, length of the bin]."""

    STATE: ClassVar[tuple[str, ...]] = ("num_steps", "tokens", "seconds", "bins")

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.bins = np.zeros((self.num_buckets, 4))
        for bucket in range(self.num_buckets):
            self._open_bin(bucket, 0, 1)

    def pull(self, bucket: int) -> int:
        """The length of the bucket's present bin."""
        return int(self.bins[bucket, 3])

    def learn(self, bucket: int, observation: StepObservation) -> None:
        """Add the step to its cell; at the end of a bin open the next."""
        super().learn(bucket, observation)
        block, place, left, _ = self.bins[bucket]
        self.bins[bucket, 2] = left - 1.0
        if left <= 1.0:
            last = place >= 2.0**block
            self._open_bin(bucket, int(block) + last, 1 if last else int(place) + 1)

    def _open_bin(self, bucket: int, block: int, place: int) -> None:
        known = self.num_steps[bucket] > 0.0
        if self.rng.random() < place**-0.5 or not known.any():
            length = int(self.rng.integers(self.num_lengths))
        else:
            cost = np.full(self.num_lengths, np.inf)
            cost[known] = self.seconds[bucket, known] / self.tokens[bucket, known]
            length = int(cost.argmin())
        self.bins[bucket] = block, place, 2.0**block, length

    def extend(self) -> None:
        """New buckets start with their first bin."""
        before = self.bins
        self.bins = before[:, :0]  # of no length, so that the padding of the others leaves it alone
        super().extend()
        self.bins = np.zeros((self.num_buckets, 4))
        for bucket in range(self.num_buckets):
            self._open_bin(bucket, 0, 1)
        self.bins[: len(before)] = before
