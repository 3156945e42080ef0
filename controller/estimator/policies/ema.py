"""SGLang's adaptive rule: a moving average of accepted tokens per bucket moves between a few tiers, with hysteresis.

Tiers 1, 3 and 7; no latency in it and no tier 0. The average must reach the present tier (minus a half) to rise, and
fall below the next lower one (minus a half and a margin) to fall; it is looked at every fifth step.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.policies.cells import CellPolicy, tokens_per_row
from speclen.controller.estimator.policies.policy import Space

TIERS = (1, 3, 7)
ALPHA = 0.2
INTERVAL = 5
WARM_UP = 10
DOWN_MARGIN = 0.25


class EmaPolicy(CellPolicy):
    """State by bucket: [average accepted tokens, steps, tier]."""

    STATE: ClassVar[tuple[str, ...]] = ("buckets",)

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.tiers = [tier for tier in TIERS if tier < self.num_lengths] or [self.num_lengths - 1]
        start = min(1, len(self.tiers) - 1)
        self.buckets = np.tile([float(self.tiers[start]), 0.0, float(start)], (self.num_buckets, 1))

    def pull(self, bucket: int) -> int:
        """The length of the bucket's tier."""
        return self.tiers[int(self.buckets[bucket, 2])]

    def learn(self, bucket: int, observation: StepObservation) -> None:
        """Move the average, and every fifth step the tier."""
        average, steps, tier = self.buckets[bucket]
        average += ALPHA * (tokens_per_row(observation) - 1.0 - average)
        index = int(tier)
        if steps + 1 >= WARM_UP and (steps + 1) % INTERVAL == 0:
            if index + 1 < len(self.tiers) and average > self.tiers[index] - 0.5:
                index += 1
            elif index > 0 and average <= self.tiers[index - 1] - 0.5 - DOWN_MARGIN:
                index -= 1
        self.buckets[bucket] = average, steps + 1, index

    def extend(self) -> None:
        """New buckets start in the middle tier."""
        before = self.buckets
        EmaPolicy.__init__(self, self.space, 0)
        self.buckets[: len(before)] = before
