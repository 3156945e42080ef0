"""The same length always: `fixed:K`, and `none` for plain decoding."""

from __future__ import annotations

from speclen.controller.estimator.policies.policy import Policy, Space


class FixedPolicy(Policy):
    """Length K, cut at the context's limit."""

    def __init__(self, space: Space, length: int) -> None:
        super().__init__(space)
        self.length = length

    def pull(self, bucket: int) -> int:
        """K everywhere."""
        return min(self.length, self.space.limits.max_speculation_length)
