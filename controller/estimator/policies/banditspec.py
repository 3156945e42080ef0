"""UCBSpec and EXP3Spec of BanditSpec (arXiv 2505.15141): one bandit over lengths 1..S, without batch size and without 0.

The paper maximises tokens per round; with lengths as arms that would always be the longest, so the reward here is what
its released code measures: tokens per second, over the largest seen so far.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.policies.cells import CellPolicy, tokens_per_row
from speclen.controller.estimator.policies.policy import Space

DELTA = 0.05


class UcbSpecPolicy(CellPolicy):
    """Mean reward plus a self-normalised confidence radius. arms: [2, lengths] of steps and summed tokens per second."""

    STATE: ClassVar[tuple[str, ...]] = ("arms",)

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.arms = np.zeros((2, self.num_lengths))

    def pull(self, bucket: int) -> int:
        """The length with the highest upper bound, each tried once first; the same in every bucket."""
        if self.num_lengths == 1:
            return 0
        steps, rewards = self.arms[:, 1:]
        if not steps.all():
            return 1 + int(steps.argmin())
        mean, total = rewards / steps, steps.sum()
        inside = 1.0 + 2.0 * np.log(len(steps) * total**2 * np.sqrt(1.0 + steps) / DELTA)
        return 1 + int((mean / mean.max() + 0.5 * np.sqrt((1.0 + steps) / steps**2 * inside)).argmax())

    def learn(self, bucket: int, observation: StepObservation) -> None:
        """Add the step's tokens per second to its length."""
        length = observation.speculation_length
        self.arms[:, length] += 1.0, tokens_per_row(observation) / observation.latency_s

    def extend(self) -> None:
        """Arms have no buckets."""
        self.num_buckets, self.num_lengths = len(self.space.buckets), self.space.limits.max_speculation_length + 1
        self.arms = np.pad(self.arms, ((0, 0), (0, self.num_lengths - self.arms.shape[1])))


class Exp3SpecPolicy(CellPolicy):
    """Exponential weights on importance-weighted losses, with the anytime rate sqrt(ln K / (t K)).

    arms: [2, lengths] of summed loss estimates, and in [1, 0] the number of steps, in [0, 0] the largest reward.
    """

    STATE: ClassVar[tuple[str, ...]] = ("arms",)

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self.arms = np.zeros((2, self.num_lengths))

    def _chances(self) -> np.ndarray:
        losses = self.arms[0, 1:]
        rate = math.sqrt(math.log(max(len(losses), 2)) / ((self.arms[1, 0] + 1.0) * len(losses)))
        weights = np.exp(-rate * (losses - losses.min()))
        chances: np.ndarray = weights / weights.sum()
        return chances

    def pull(self, bucket: int) -> int:
        """A draw; the same chances in every bucket."""
        return 1 + int(self.rng.choice(self.num_lengths - 1, p=self._chances())) if self.num_lengths > 1 else 0

    def learn(self, bucket: int, observation: StepObservation) -> None:
        """Add the step's loss, divided by the chance that its length had."""
        length = observation.speculation_length
        if length == 0:
            return
        reward = tokens_per_row(observation) / observation.latency_s
        self.arms[0, 0] = max(self.arms[0, 0], reward)
        loss = 1.0 - reward / self.arms[0, 0]
        self.arms[0, length] += loss / max(float(self._chances()[length - 1]), 1e-6)
        self.arms[1, 0] += 1.0

    def extend(self) -> None:
        """Arms have no buckets."""
        self.num_buckets, self.num_lengths = len(self.space.buckets), self.space.limits.max_speculation_length + 1
        self.arms = np.pad(self.arms, ((0, 0), (0, self.num_lengths - self.arms.shape[1])))
