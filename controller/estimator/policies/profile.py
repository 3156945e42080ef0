"""The paper's policy: a table computed once from an offline profile and never changed.

Su, Giannoula and Pekhimenko (arXiv 2310.18813): for each batch size the length with the least time per token in the
profile. Between profiled batch sizes step times are interpolated; beyond them the nearest holds. Without a profile the
length is 2, cut at the limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from speclen.controller.estimator.core import Bucket, Profile
from speclen.controller.estimator.policies.policy import Policy, Space

DEFAULT_LENGTH = 2


def profile_seconds(profile: Profile, batch_size: float) -> dict[int, float]:
    """Step time of every profiled length at a batch size, by linear interpolation; the nearest cell beyond the ends."""
    by_length: dict[int, list[tuple[int, float]]] = {}
    for cell in profile.cells:
        by_length.setdefault(cell.speculation_length, []).append((cell.batch_size, cell.step_s))
    out = {}
    for length, points in by_length.items():
        sizes, seconds = zip(*sorted(points), strict=True)
        out[length] = float(np.interp(batch_size, sizes, seconds))
    return out


def profile_tokens(profile: Profile, length: int) -> float:
    """Expected tokens per row and step in the profile; positions beyond it add nothing."""
    return 1.0 + sum(profile.survival[:length])


class ProfilePolicy(Policy):
    """Best length of the profile in every bucket."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.profile: Profile | None = None
        self.lengths: list[int] = []
        self.extend()

    def pull(self, bucket: int) -> int:
        """The table's length."""
        return self.lengths[bucket]

    def seed(self, profile: Profile) -> None:
        """Compute the table."""
        self.profile = profile
        self.extend()

    def extend(self) -> None:
        """Compute the table for the buckets there are."""
        self.lengths = [self._best(bucket) for bucket in self.space.buckets]

    def _best(self, bucket: Bucket) -> int:
        longest = self.space.limits.max_speculation_length
        if self.profile is None or not self.profile.cells:
            return min(DEFAULT_LENGTH, longest)
        profile = self.profile
        seconds = profile_seconds(profile, (bucket.batch_min + bucket.batch_max) / 2.0)
        return min(seconds, key=lambda length: seconds[length] / profile_tokens(profile, length))

    def export_state(self) -> dict[str, Any]:
        """The table."""
        return {"lengths": self.lengths}

    def restore(self, state: dict[str, Any]) -> None:
        """The table as it was; a later profile replaces it."""
        self.lengths = [int(length) for length in state["lengths"]]
