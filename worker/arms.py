"""Selection of arms in a worker: choosers and tables of arms.

An `ArmTable` is a tuple indexed by batch size. It is replaced as a whole, so a step reads it without a lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from speclen.records import PLAIN, Arm, Choice, Limits, StepRecord

DEFAULT_ARM = Arm(2)  # without profile or controller: rarely the best arm, rarely far from it
# Drafting is switched once this many more steps asked for the switch than against it. At 12, rollouts that shrank from 64 to
# one sequence ran 3 to 7% of their small steps without the drafts that the table asks for; at 6 half of that, and the draft
# model catches up on 0.1 tokens more per step.
CONTRARY_STEPS = 6
FAR = 3  # weight of a step if no nearby batch size agrees with the present mode: the load has changed
NEAR = 0.125  # batch sizes within this share of the present one are nearby: their arms are nearly as good


@dataclass(frozen=True, slots=True)
class ArmTable:
    """The arm in use at every batch size.

    arms[b]: the arm at batch size b; entry 0 is unused. choices: the same by batch range. version: of the controller's
    table; 0 for other tables. source, for people: "controller", "last table", "profile", "policy" or "default".
    """

    arms: tuple[Arm, ...]
    choices: tuple[Choice, ...]
    source: str
    version: int = 0

    @classmethod
    def of(cls, choices: Iterable[Choice], limits: Limits, source: str, version: int = 0) -> ArmTable:
        """A table for batch sizes 1 to limits.max_batch_size, with arms cut to the limits.

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
    """Hysteresis for drafting: selects arms from tables, and switches the draft model on or off only after CONTRARY_STEPS.

    Batch sizes change from step to step, and after a pause in drafting the draft model must catch up on all sequences.
    """

    def __init__(self) -> None:
        self._drafts, self._contrary = True, 0

    def arm_for(self, table: ArmTable, batch_size: int) -> Arm:
        """The table's arm at batch_size, or that of a nearby batch size which does not switch drafting on or off."""
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


class ArmChoice(NamedTuple):
    """The arm of one step. decision_version: of its table, 0 without one. probe_id: 0 unless the step belongs to a probe."""

    arm: Arm
    decision_version: int = 0
    probe_id: int = 0


class ArmChooser(Protocol):
    """Selects the arm of every step and receives the steps' records. Called from the engine's thread; never blocks."""

    @property
    def wants_evaluations(self) -> bool:
        """True while finished outputs should be evaluated."""

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        """Select the arm of the next step. Called once per step, since every call uses up a step of a probe."""

    def report(self, record: StepRecord) -> None:
        """Take the record of a step. Its seq is 0: the chooser numbers the steps that it reports."""


@dataclass(slots=True)
class FixedArm:
    """Selects the same arm for every step: for measurements."""

    arm: Arm
    wants_evaluations: bool = False

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        return ArmChoice(self.arm)

    def report(self, record: StepRecord) -> None:
        """Ignore the record."""
