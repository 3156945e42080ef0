"""What a way to choose lengths has to say, and what it says where it has nothing of its own to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.core import Profile, StepObservation


class Policy:
    """Chooses a length per bucket of one context; learns from groups of steps. Only `pull` has no default."""

    def __init__(self, model: ContextModel) -> None:
        self.model = model

    def pull(self, bucket: int) -> int:
        """The length to use next in a bucket."""
        raise NotImplementedError

    def pull_all(self) -> list[int]:
        """The same for every bucket, in order."""
        return [self.pull(bucket.index) for bucket in self.model.buckets]

    def update(self, buckets: np.ndarray, observations: Sequence[StepObservation]) -> None:
        """Learn from a group; buckets[i] is that of observations[i]. The context's model has learned from it before."""

    def probe(self, bucket: int, max_length: int | None = None) -> int | None:
        """An exploratory length for one step, at most max_length; mostly None."""
        return None

    def probe_goes_on(self, bucket: int) -> bool:
        """Whether the last probe of the bucket is only complete with another one right after it."""
        return False

    def seed(self, profile: Profile) -> None:
        """A profile was imported; the context's model has been seeded with it before."""

    def extend(self) -> None:
        """The context's model got more buckets or lengths, or was restored."""

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state, after the context's model has been restored."""
