"""Measured cost table times windowed acceptance: what throughput-aware schedulers propose.

Step times come from the profile and stay; without one, each length of a bucket is timed once and its first measurement
stays. Acceptance by position is the average over the last steps of all buckets. Nothing is explored.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from speclen.controller.estimator.core import Profile, StepObservation
from speclen.controller.estimator.policies.cells import CellPolicy
from speclen.controller.estimator.policies.policy import Space
from speclen.controller.estimator.policies.profile import profile_seconds

WINDOW_STEPS = 200


class ThroughputAwarePolicy(CellPolicy):
    """seconds: cost table; window: [steps, 2, positions] rows that passed and reached each position, a ring."""

    STATE: ClassVar[tuple[str, ...]] = ("num_steps", "seconds", "window", "prior")

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.window = np.zeros((WINDOW_STEPS, 2, self.num_lengths - 1))
        self.prior = np.full(self.num_lengths - 1, 0.7)
        self.totals = np.zeros((2, self.num_lengths - 1))

    def pull(self, bucket: int) -> int:
        """The length with the most expected tokens per measured second; unmeasured ones first."""
        unmeasured = self.seconds[bucket] == 0.0
        if unmeasured.any():
            return int(unmeasured.argmax())
        acceptance = (self.totals[0] + self.prior) / (self.totals[1] + 1.0)
        tokens = 1.0 + np.concatenate([[0.0], acceptance.cumprod().cumsum()])
        return int((tokens / self.seconds[bucket]).argmax())

    def learn(self, bucket: int, observation: StepObservation) -> None:
        """Time a cell that has no time yet, and put the step's acceptance into the window."""
        length = observation.speculation_length
        if self.seconds[bucket, length] == 0.0:
            self.seconds[bucket, length] = observation.latency_s
        place = int(self.num_steps.sum()) % WINDOW_STEPS
        self.num_steps[bucket, length] += 1.0
        at_least = np.cumsum(observation.accepted_histogram[::-1])[::-1]
        self.totals -= self.window[place]
        self.window[place] = 0.0
        self.window[place, :, :length] = at_least[1:], at_least[:-1]
        self.totals += self.window[place]

    def seed(self, profile: Profile) -> None:
        """Take the cost table and the first guess of acceptance from the profile."""
        for bucket in self.space.buckets:
            times = profile_seconds(profile, (bucket.batch_min + bucket.batch_max) / 2.0)
            for length, seconds in times.items():
                self.seconds[bucket.index, length] = seconds
        survival = np.array(profile.survival[: self.num_lengths - 1])
        self.prior[: len(survival)] = survival / np.concatenate([[1.0], survival[:-1]])

    def restore(self, state: dict[str, object]) -> None:
        """The window's totals follow from the window."""
        super().restore(state)
        self.totals = self.window.sum(axis=0)

    def extend(self) -> None:
        """The window has positions, not buckets."""
        super().extend()
        more = self.num_lengths - 1 - len(self.prior)
        self.window = np.pad(self.window, ((0, 0), (0, 0), (0, more)))
        self.prior = np.append(self.prior, np.full(more, 0.7))
        self.totals = self.window.sum(axis=0)
