"""Learners that play in the worlds: the estimator, and arms that never change."""

from __future__ import annotations

from typing import Protocol

from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Limits, Probe, StepRecord

KEY = ContextKey("simulated target", "simulated draft", "simulated H200", "bfloat16")
WORKER = "worker"


class Learner(Protocol):
    """An estimator under test. Its answers may change only in `observe`."""

    def observe(self, records: list[StepRecord]) -> None:
        """Learn from a group of steps, oldest first."""

    def arm_for(self, batch_size: int) -> Arm:
        """Select the arm for steps of this batch size."""

    def probe_for(self, batch_size: int) -> Probe | None:
        """Return an arm to explore for some steps, or None. Asked after every group of reports."""


class Adaptive:
    """The estimator as one worker sees it. probe_steps: consecutive steps of a probe."""

    def __init__(self, limits: Limits, probe_steps: int) -> None:
        self.limits, self.probe_steps = limits, probe_steps
        self.estimator = Estimator()
        self.estimator.add_context(KEY, limits)
        self._table = self.estimator.table(KEY, WORKER)

    def observe(self, records: list[StepRecord]) -> None:
        """Learn from a group of steps."""
        self.estimator.observe(KEY, records, WORKER)
        self._table = self.estimator.table(KEY, WORKER)

    def arm_for(self, batch_size: int) -> Arm:
        """Select the table's arm."""
        return self._table.arm_for(batch_size)

    def probe_for(self, batch_size: int) -> Probe | None:
        """Return what the estimator wants to try."""
        return self.estimator.take_probe(KEY, WORKER, batch_size, self.limits, self.probe_steps)


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
        return None
