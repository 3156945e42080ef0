"""The same length always: `fixed:K`, and `none` for plain decoding."""

from __future__ import annotations

from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.policies.policy import Policy


class FixedPolicy(Policy):
    """Length K, cut at the context's limit."""

    def __init__(self, model: ContextModel, length: int) -> None:
        super().__init__(model)
        self.length = length

    def pull(self, bucket: int) -> int:
        """K everywhere."""
        return min(self.length, self.model.limits.max_speculation_length)
