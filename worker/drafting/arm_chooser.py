"""The component that selects arms, as the engine uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from speclen.records import Arm, StepRecord


class ArmChoice(NamedTuple):
    """The arm of one step. decision_version: of its table, 0 without one. probe_id: 0 unless the step is exploratory."""

    arm: Arm
    decision_version: int = 0
    probe_id: int = 0


class ArmChooser(Protocol):
    """Selects arms and learns from steps. Its methods are called from the engine's thread and never block."""

    @property
    def wants_evaluations(self) -> bool:
        """True while finished outputs should be evaluated."""

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        """The arm of the next step; called once per step, since it uses up a probe."""

    def report(self, record: StepRecord) -> None:
        """Report a step. Its seq is 0."""


@dataclass(slots=True)
class FixedArm:
    """Always the same arm, without learning: for measurements."""

    arm: Arm
    wants_evaluations: bool = False

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        return ArmChoice(self.arm)

    def report(self, record: StepRecord) -> None:
        """Ignore it."""
