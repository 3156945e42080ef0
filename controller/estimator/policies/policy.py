"""What a way to choose lengths has to say, and what it says where it has nothing of its own to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speclen.controller.estimator.core import Bucket, Limits, Profile, StepObservation


@dataclass(slots=True)
class Space:
    """What there is to choose among: lengths 0 to the limit, in each bucket. Grows when a context is widened."""

    limits: Limits
    buckets: tuple[Bucket, ...]

    def bucket_of(self, batch_sizes: Sequence[int]) -> np.ndarray:
        """The bucket of each batch size; sizes beyond the limit belong to the last."""
        ends = [bucket.batch_max for bucket in self.buckets]
        return np.searchsorted(ends, np.minimum(batch_sizes, ends[-1]))


class Policy:
    """Chooses a length per bucket of one context; learns from groups of steps. Only `pull` has no default."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def pull(self, bucket: int) -> int:
        """The length to use next in a bucket."""
        raise NotImplementedError

    def pull_all(self) -> list[int]:
        """The same for every bucket, in order."""
        return [self.pull(bucket.index) for bucket in self.space.buckets]

    def update(self, buckets: np.ndarray, observations: Sequence[StepObservation]) -> None:
        """Learn from a group; buckets[i] is that of observations[i]."""

    def seed(self, profile: Profile) -> None:
        """A profile was imported."""

    def extend(self) -> None:
        """There are more buckets or lengths than before."""

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state."""
