"""The controller's estimator as simulated workers see it: a table, probes, groups of reports."""

from __future__ import annotations

from collections.abc import Sequence

from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Limits, Probe, Profile, StepRecord, Table

KEY = ContextKey("simulated target", "simulated draft", "simulated device", "float32")


class EstimatorLearner:
    """An estimator with one context. probe_steps: of each probe."""

    def __init__(self, limits: Limits, policy: str, profile: Profile | None, probe_steps: int) -> None:
        self.limits, self.probe_steps = limits, probe_steps
        self.estimator = Estimator(policy=policy)
        self.estimator.add_context(KEY, limits)
        if profile is not None:
            self.estimator.seed_profile(KEY, profile)
        self._tables: dict[str, Table] = {}

    def observe(self, records: Sequence[StepRecord], worker: str) -> None:
        """Learn from a group of consecutive steps of one worker."""
        outcome = self.estimator.observe(KEY, records, worker)
        if outcome.decisions or outcome.drift_events:
            self._tables = {}

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """The arm in use for a worker."""
        if worker not in self._tables:
            self._tables[worker] = self.estimator.table(KEY, worker)
        return self._tables[worker].arm_for(batch_size)

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """The exploratory arm that the estimator hands out now. batch_size: of the worker's newest report."""
        return self.estimator.take_probe(KEY, worker, batch_size, self.limits, self.probe_steps)


class Constant:
    """A learner that always selects one arm."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def observe(self, records: Sequence[StepRecord], worker: str) -> None:
        """Learn nothing."""

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """Select the arm."""
        return self.arm

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """Explore nothing."""


Learner = EstimatorLearner | Constant  # their answers change only in `observe`
