"""The controller's estimator as simulated workers see it: a table, probes, groups of reports."""

from __future__ import annotations

from collections.abc import Sequence

from speclen.controller.estimator import Estimator
from speclen.records import Arm, ContextKey, Limits, Probe, Profile, StepRecord

KEY = ContextKey("simulated target", "simulated draft", "simulated device", "float32")
WORKER = "worker-0"


class EstimatorLearner:
    """An estimator with one context. probe_steps: of each probe."""

    def __init__(
        self, limits: Limits, policy: str = "adaptive", profile: Profile | None = None, probe_steps: int = 3
    ) -> None:
        """Raises ValueError for an unknown policy."""
        self.limits, self.probe_steps = limits, probe_steps
        self.estimator = Estimator(policy)
        self.estimator.add_context(KEY, limits)
        if profile is not None:
            self.estimator.seed_profile(KEY, profile)
        self.num_probes = self.num_decisions = 0
        self._arms: dict[str, list[Arm]] = {}

    def observe(self, records: Sequence[StepRecord], worker: str = WORKER) -> None:
        """Learn from a group of consecutive steps of one worker."""
        outcome = self.estimator.observe(KEY, records, worker)
        self.num_decisions += len(outcome.decisions)
        if outcome.decisions or outcome.drift_events:
            self._arms = {}

    def arm_for(self, batch_size: int, worker: str = WORKER) -> Arm:
        """The arm in use for a worker."""
        if worker not in self._arms:
            choices = self.estimator.table(KEY, worker).choices
            sizes = ([choice.arm] * (choice.batch_max - choice.batch_min + 1) for choice in choices)
            self._arms[worker] = [Arm(), *(arm for arms in sizes for arm in arms)]
        return self._arms[worker][batch_size]

    def probe_for(self, batch_size: int, worker: str = WORKER) -> Probe | None:
        """The exploratory arm that the estimator hands out now. batch_size: of the worker's newest report."""
        probe = self.estimator.take_probe(KEY, worker, batch_size, self.limits, self.probe_steps)
        self.num_probes += probe is not None
        return probe


class Constant:
    """A learner that always selects one arm."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    def observe(self, records: Sequence[StepRecord], worker: str = WORKER) -> None:
        """Learn nothing."""

    def arm_for(self, batch_size: int, worker: str = WORKER) -> Arm:
        """Select the arm."""
        return self.arm

    def probe_for(self, batch_size: int, worker: str = WORKER) -> Probe | None:
        """Explore nothing."""


Learner = EstimatorLearner | Constant  # their answers change only in `observe`


class ProbeRun:
    """A probe at its worker: consecutive steps at its batch sizes, from the first that fits."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.steps_left = probe, probe.num_steps

    def fits(self, batch_size: int) -> bool:
        """True if the next step can be one of the probe's."""
        return self.steps_left > 0 and self.probe.batch_min <= batch_size <= self.probe.batch_max

    def is_over(self, batch_size: int) -> bool:
        """True if no step is left, or the run was interrupted."""
        return not self.steps_left or (self.steps_left < self.probe.num_steps and not self.fits(batch_size))
