"""The arm in use at every batch size, and hysteresis for drafting.

A tuple indexed by batch size, replaced as a whole, so that a step reads it without a lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speclen.records import PLAIN, Arm, Choice, Limits

DEFAULT_ARM = Arm(2)  # without profile and controller: rarely best, rarely far off
CONTRARY_STEPS = 12  # surplus of steps whose arm disagrees about drafting, before it is switched
FAR = 3  # weight of a step if no batch size near it agrees: the load has changed
NEAR = 0.125  # arms of batch sizes within this share of the present one are nearly as good there


@dataclass(frozen=True, slots=True)
class ArmTable:
    """arms[b]: at batch size b; entry 0 is unused. choices: the same as ranges. version: of the controller's table, or 0.

    source: "controller", "last table", "profile", "policy" or "default", for people.
    """

    arms: tuple[Arm, ...]
    choices: tuple[Choice, ...]
    source: str
    version: int = 0

    @classmethod
    def of(cls, choices: Iterable[Choice], limits: Limits, source: str, version: int = 0) -> ArmTable:
        """A table for batch sizes 1 to limits.max_batch_size; arms are cut to the limits.

        Raises ValueError if a batch size is in no range.
        """
        ranges = tuple(choice._replace(arm=choice.arm.within(limits)) for choice in choices)
        arms: list[Arm | None] = [PLAIN, *[None] * limits.max_batch_size]
        for choice in ranges:
            for batch_size in range(max(1, choice.batch_min), min(choice.batch_max, limits.max_batch_size) + 1):
                arms[batch_size] = choice.arm
        known = tuple(arm for arm in arms if arm is not None)
        if len(known) < len(arms):
            raise ValueError(f"the table says nothing about batch size {arms.index(None)}")
        return cls(known, ranges, source, version)

    @classmethod
    def constant(cls, arm: Arm, limits: Limits, source: str) -> ArmTable:
        """The same arm at every batch size."""
        return cls.of([Choice(1, limits.max_batch_size, arm)], limits, source)


class SteadyDrafts:
    """Selects arms from tables, and switches drafting on or off only after CONTRARY_STEPS.

    Batch sizes change from step to step, and resuming drafting makes all sequences catch up.
    """

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
