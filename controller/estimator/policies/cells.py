"""What the comparison policies share: arrays of statistics over buckets and lengths that can be stored and restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.policies.policy import Policy, Space


def tokens_per_row(observation: StepObservation) -> float:
    """Tokens that a step gave each row on average, the bonus token included."""
    return 1.0 + observation.num_accepted / observation.batch_size


class CellPolicy(Policy):
    """Keeps the arrays named in STATE, with one row per bucket (or without rows, where a subclass shares them).

    A subclass implements pull and learn.
    """

    STATE: ClassVar[tuple[str, ...]] = ("num_steps", "tokens", "seconds")

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space)
        self.rng = np.random.default_rng(seed)
        self.num_buckets = len(space.buckets)
        self.num_lengths = space.limits.max_speculation_length + 1
        # Steps, tokens per row and seconds by [bucket, length], summed.
        shape = (self.num_buckets, self.num_lengths)
        self.num_steps, self.tokens, self.seconds = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def learn(self, bucket: int, observation: StepObservation) -> None:
        """Learn from one step: by default add it to its cell."""
        length = observation.speculation_length
        self.num_steps[bucket, length] += 1.0
        self.tokens[bucket, length] += tokens_per_row(observation)
        self.seconds[bucket, length] += observation.latency_s

    def update(self, buckets: np.ndarray, observations: Sequence[StepObservation]) -> None:
        """Learn from a group, step by step."""
        for bucket, observation in zip(np.asarray(buckets).tolist(), observations, strict=True):
            self.learn(bucket, observation)

    def extend(self) -> None:
        """Make room for more buckets and lengths."""
        self.num_buckets, self.num_lengths = len(self.space.buckets), self.space.limits.max_speculation_length + 1
        for name in self.STATE:
            values = getattr(self, name)
            if values.ndim == 2:
                more = (self.num_buckets - values.shape[0], self.num_lengths - values.shape[1])
                setattr(self, name, np.pad(values, ((0, more[0]), (0, more[1]))))

    def export_state(self) -> dict[str, Any]:
        """The arrays, and where the random numbers stand."""
        arrays = {name: getattr(self, name).tolist() for name in self.STATE}
        return {"arrays": arrays, "random": self.rng.bit_generator.state}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state."""
        for name in self.STATE:
            setattr(self, name, np.array(state["arrays"][name], dtype=float))
        self.rng.bit_generator.state = state["random"]
