"""The arm in use at every batch size.

A tuple indexed by batch size, replaced as a whole, so that a step reads it without a lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from speclen.records import PLAIN, Arm, Choice, Limits

DEFAULT_ARM = Arm(2)  # without profile and controller: rarely best, rarely far off


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
