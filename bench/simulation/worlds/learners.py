"""Learners under test in the worlds."""

from __future__ import annotations

from typing import Protocol

from speclen.records import Arm, Probe, StepRecord


class Learner(Protocol):
    """An estimator under test. Its answers may change only in `observe`."""

    def observe(self, records: list[StepRecord]) -> None:
        """Learn from a group of steps, oldest first."""

    def arm_for(self, batch_size: int) -> Arm:
        """Select the arm for steps of this batch size."""

    def probe_for(self, batch_size: int) -> Probe | None:
        """Return an arm to explore, or None. Asked after every group of reports, with the newest one's batch size."""


class Constant:
    """A learner that always selects one arm."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def observe(self, records: list[StepRecord]) -> None:
        """Learn nothing."""

    def arm_for(self, batch_size: int) -> Arm:
        """Select the arm."""
        return self.arm

    def probe_for(self, batch_size: int) -> Probe | None:
        """Explore nothing."""
