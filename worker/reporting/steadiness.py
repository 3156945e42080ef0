"""Hysteresis for drafting: batch sizes change from step to step, and resuming drafting makes all sequences catch up."""

from __future__ import annotations

from speclen.records import Arm
from speclen.worker.reporting.table import ArmTable

CONTRARY_STEPS = 12  # surplus of steps whose arm disagrees about drafting, before it is switched
FAR = 3  # weight of a step if no batch size near it agrees: the load has changed
NEAR = 0.125  # arms of batch sizes within this share of the present one are nearly as good there


class SteadyDrafts:
    """Selects arms from tables, and switches drafting on or off only after CONTRARY_STEPS."""

    def __init__(self) -> None:
        self._drafts, self._contrary = True, 0

    def arm_for(self, table: ArmTable, batch_size: int) -> Arm:
        """The table's arm, or a near one that agrees with the steps before about drafting."""
        arm = table.arms[batch_size]
        if bool(arm.speculation_length) == self._drafts:
            self._contrary = max(self._contrary - 1, 0)
            return arm
        reach = max(1, int(NEAR * batch_size))
        near = table.arms[max(1, batch_size - reach) : batch_size + reach + 1]
        alike = [other for other in near if bool(other.speculation_length) == self._drafts]
        self._contrary += 1 if alike else FAR
        if self._contrary >= CONTRARY_STEPS:
            self._drafts, self._contrary = not self._drafts, 0
            return arm
        return alike[0] if alike else arm if self._drafts else Arm(0, arm.ngram)
