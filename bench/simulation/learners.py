"""Learners of simulated worlds: the estimator, and the simple rules that it is compared with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import log

import numpy as np

from speclen.controller.baseline.guard import Guard, Verdict
from speclen.controller.estimator import Estimator, EstimatorSettings
from speclen.records import Arm, Choice, Limits, Probe, Profile, StepRecord, Table, Trial


class EstimatorLearner:
    """The controller's estimator with one context. probe_steps: of each probe."""

    def __init__(self, settings: EstimatorSettings, limits: Limits, profile: Profile | None, probe_steps: int) -> None:
        self.limits, self.probe_steps, self.num_drift_events = limits, probe_steps, 0
        self.estimator = Estimator(settings, limits)
        if profile is not None:
            self.estimator.seed(profile)
        self._arms: dict[tuple[int, str], Arm] = {}

    def observe(self, records: Sequence[StepRecord], worker: str) -> None:
        """Learn from a group of consecutive steps of one worker."""
        outcome = self.estimator.observe(records, worker)
        self.num_drift_events += len(outcome.drift_events)
        if outcome.decisions or outcome.drift_events:
            self._arms = {}

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """The arm in use for a worker."""
        if (batch_size, worker) not in self._arms:
            self._arms[batch_size, worker] = self.estimator.arm_for(batch_size, worker)
        return self._arms[batch_size, worker]

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """The exploratory arm that the estimator emits now. batch_size: of the worker's newest report."""
        return self.estimator.probe(worker, batch_size, self.limits, self.probe_steps)


class Fixed:
    """A rule that does not learn: an arm for each batch size, that of the next larger one where it has none."""

    num_drift_events = 0

    def __init__(self, arms: dict[int, Arm]) -> None:
        self.sizes, self.arms = sorted(arms), arms

    @classmethod
    def best_of(cls, profile: Profile) -> Fixed:
        """The arm with the most tokens per second at each profiled batch size."""
        tokens = 1.0 + np.concatenate([[0.0], np.cumsum(profile.survival)])
        cells = sorted(profile.cells, key=lambda cell: tokens[cell.speculation_length] / cell.step_s)
        return cls({cell.batch_size: Arm(cell.speculation_length) for cell in cells})

    def observe(self, records: Sequence[StepRecord], worker: str) -> None:
        """Learn nothing."""

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """Select the arm of the batch size."""
        return self.arms[self.sizes[min(bisect_left(self.sizes, batch_size), len(self.sizes) - 1)]]

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """Explore nothing."""


class PlugIn:
    """Discounted means of log times by size and arm, pooled acceptance, and 2% of the steps for the arm tried least.

    Sizes are pooled by half octaves. Means of few samples are shrunk towards the sum of an effect of the arm and one of the
    size. What n-gram arms yield is the discounted mean of their own steps.
    """

    EXPLORED, DISCOUNT = 0.02, 0.995
    num_drift_events = 0

    def __init__(self, limits: Limits, probe_steps: int) -> None:
        self.arms, self.probe_steps = limits.arms(), probe_steps
        self.cold = Arm(min(2, limits.max_speculation_length))
        self.times = np.zeros(
            (2, len(self.arms), 2 * limits.max_batch_size.bit_length() + 1)
        )  # count, sum of log seconds
        self.tokens = np.full((2, len(self.arms)), 1e-9)  # of n-gram arms: sequences, their tokens
        self.runs = np.zeros((2, limits.max_speculation_length)) + [[1.0], [0.7]]  # drafts that got there, that passed
        self.owed, self.num_probes = 0.0, 0
        self.chosen: dict[int, Arm] = {}
        self.log_s: np.ndarray | None = None

    def observe(self, records: Sequence[StepRecord], worker: str) -> None:
        """Count accepted tokens, and times of steps without flags."""
        for record in records:
            at, size = self.arms.index(record.arm), self.size(record.batch_size)
            runs = np.cumsum(record.accepted_histogram[::-1])[::-1]
            if record.arm.ngram:
                self.tokens[:, at] = self.DISCOUNT * self.tokens[:, at] + [runs[0], record.num_tokens]
            elif length := record.arm.speculation_length:
                self.runs[:, :length] = self.DISCOUNT * self.runs[:, :length] + [runs[:-1], runs[1:]]
            for output in record.evaluations:
                every = slice(None, None, len(self.arms) // len(output.num_steps))
                seen = np.array([output.num_steps, [output.num_tokens] * len(output.num_steps)])
                self.tokens[:, every] = self.DISCOUNT**10 * self.tokens[:, every] + seen
            if not record.flags:
                self.times[:, at, size] = self.DISCOUNT * self.times[:, at, size] + [1.0, log(record.latency_s)]
        self.owed += self.EXPLORED * len(records)
        self.log_s, self.chosen = None, {}

    def size(self, batch_size: int) -> int:
        """Half octave of a batch size."""
        return round(2 * log(batch_size, 2))

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """Select the arm with the most tokens per second, of those that were run."""
        if (size := self.size(batch_size)) not in self.chosen:
            self.chosen[size] = self.best_arm(size)
        return self.chosen[size]

    def best_arm(self, size: int) -> Arm:
        """The arm with the most tokens per second at a half octave."""
        seen = self.times[0].sum(axis=1) > 0
        if not seen.any():
            return self.cold
        if self.log_s is None:
            self.log_s = self.mean_log_s()
        survival = np.cumsum([1.0, *np.cumprod(self.runs[1] / self.runs[0])])
        drafted = survival[[arm.speculation_length for arm in self.arms]]
        tokens = np.where([arm.ngram for arm in self.arms], self.tokens[1] / self.tokens[0], drafted)
        score = np.where(seen, np.log(tokens) - self.log_s[:, size], -np.inf)
        return self.arms[int(score.argmax())]

    def mean_log_s(self) -> np.ndarray:
        """Log seconds by arm and size: means, shrunk towards a sum of two effects."""
        count, total = self.times
        of_arm, of_size = np.zeros((len(count), 1)), np.zeros((1, count.shape[1]))
        for _ in range(8):
            of_size = ((total - count * of_arm).sum(axis=0) / np.maximum(count.sum(axis=0), 1e-9))[None]
            of_arm = ((total - count * of_size).sum(axis=1) / (count.sum(axis=1) + 1e-9))[:, None]
        found: np.ndarray = (total + 3.0 * (of_arm + of_size)) / (count + 3.0)
        return found

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """Try the arm with the fewest samples at this size once enough steps have been taken."""
        if self.owed < self.probe_steps:
            return None
        self.owed -= self.probe_steps
        self.num_probes += 1
        samples = 0.1 * self.times[0].sum(axis=1) + self.times[0, :, self.size(batch_size)]
        least = int(
            (samples + 1e-3 * (7 * np.arange(len(samples)) % len(samples))).argmin()
        )  # lengths and n-grams in turn
        low, high = max(1, int(batch_size / 1.2)), int(batch_size * 1.2) + 1
        return Probe(self.num_probes, low, high, self.arms[least], self.probe_steps)


class Guarded:
    """A learner with the controller's guard around it, which calls both as the service does."""

    def __init__(self, learner: Learner, baseline: Arm, limits: Limits, transition: int) -> None:
        self.learner, self.limits, self.transition = learner, limits, transition
        self.baseline = (Choice(1, limits.max_batch_size, baseline),)
        self.guard, self.num_steps = Guard(), 0
        self.trials: list[tuple[int, Trial]] = []  # with the number of the step
        self.verdicts: list[tuple[int, Verdict]] = []
        self._learned: dict[str, Table] = {}
        self._arms: dict[str, list[Arm]] = {}

    @property
    def num_drift_events(self) -> int:
        """Changes that the learner detected."""
        return self.learner.num_drift_events

    def _table(self, worker: str) -> Table:
        if worker not in self._learned:
            sizes = range(1, self.limits.max_batch_size + 1)
            choices = (Choice(size, size, self.learner.arm_for(size, worker)) for size in sizes)
            self._learned[worker] = Table(0, tuple(choices))
        return self._learned[worker]

    def observe(self, records: Sequence[StepRecord], worker: str) -> None:
        """Learn from a group of consecutive steps of one worker."""
        self.num_steps += len(records)
        self.learner.observe(records, worker)
        version = self.guard.version
        for found in self.guard.observe(worker, records, self.transition, self.limits):
            if isinstance(found, Trial):
                self.trials.append((self.num_steps, found))
            else:
                self.verdicts.append((self.num_steps, found))
        if not isinstance(self.learner, Fixed):
            self._learned.clear()
        if not self._learned or self.guard.version != version:
            self._arms.clear()

    def arm_for(self, batch_size: int, worker: str) -> Arm:
        """The arm in use for a worker."""
        if worker not in self._arms:
            table = self.guard.overrule(self._table(worker), self.baseline)
            self._arms[worker] = [table.arm_for(size) for size in range(self.limits.max_batch_size + 1)]
        return self._arms[worker][batch_size]

    def probe_for(self, batch_size: int, worker: str) -> Probe | None:
        """A trial, or an exploratory arm of the learner."""
        trial = self.guard.next_trial(worker, batch_size, self._table(worker), self.baseline)
        return trial or self.learner.probe_for(batch_size, worker)


Learner = EstimatorLearner | Fixed | PlugIn | Guarded  # their answers change only in `observe`
