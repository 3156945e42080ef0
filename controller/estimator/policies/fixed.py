"""The same length always: `fixed:K`, and `none` for plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.core import Profile, StepObservation


class FixedPolicy:
    """Length K, cut at the context's limit."""

    def __init__(self, model: ContextModel, length: int) -> None:
        self.model = model
        self.length = length

    def pull(self, bucket: int) -> int:
        """K everywhere."""
        return min(self.length, self.model.limits.max_speculation_length)

    def pull_all(self) -> list[int]:
        """The same for every bucket."""
        return [self.pull(0)] * len(self.model.buckets)

    def update(self, buckets: np.ndarray, observations: Sequence[StepObservation]) -> None:
        """Nothing to learn."""

    def seed(self, profile: Profile) -> None:
        """Nothing to take from a profile."""

    def extend(self) -> None:
        """Nothing depends on the buckets."""

    def export_state(self) -> dict[str, Any]:
        """No state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """No state."""
