"""Adapter of `controller.estimator.Estimator` to the worlds, to be deleted with it."""

from __future__ import annotations

from speclen.bench.simulation.worlds.records import Arm, Record
from speclen.controller.estimator.core import ContextKey, Limits, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.plan import CopiedRun, Copies, Plan
from speclen.controller.estimator.plans.reviews import OutputReview

KEY = ContextKey("simulated target", "simulated draft", "simulated H200", "bfloat16")
WORKER, PROBE_STEPS = "worker", 2
NGRAM_MATCH, NGRAM_TOKENS = 3, 8


class Today:
    """Learner around the estimator. Any plan that copies is played at the worlds' one n-gram setting."""

    def __init__(self, max_batch_size: int, ngram: bool = False, probe_steps: int = PROBE_STEPS) -> None:
        self.limits = Limits(max_batch_size, 8, NGRAM_TOKENS if ngram else 0)
        self.probe_steps = probe_steps
        self.estimator = Estimator()
        self.estimator.add_context(KEY, self.limits)
        self._arms: dict[int, Arm] = {}

    def observe(self, records: list[Record]) -> None:
        """Learn from a group of steps."""
        self.estimator.observe(KEY, [observation(record) for record in records], WORKER)
        self._arms = {}

    def arm_for(self, batch_size: int) -> Arm:
        """Select the table's choice."""
        if not self._arms:
            table = self.estimator.table(KEY, WORKER)
            for choice in table.choices:
                for size in range(choice.bucket.batch_min, choice.bucket.batch_max + 1):
                    self._arms[size] = arm_of(choice.speculation_length, choice.plan)
        return self._arms[batch_size]

    def probe_for(self, batch_size: int) -> tuple[Arm, int] | None:
        """Return what the estimator wants to try."""
        limits = self.limits
        probe = self.estimator.take_probe(
            *(KEY, batch_size, limits.max_speculation_length, WORKER, limits.max_copied_tokens, self.probe_steps)
        )
        return None if probe is None else (arm_of(probe.speculation_length, probe.plan), self.probe_steps)


def arm_of(length: int, plan: Plan | None) -> Arm:
    """The arm that is played for a choice."""
    return Arm(length) if plan is None else Arm(plan.draft_length, plan.copy_min_match > 0)


def observation(record: Record) -> StepObservation:
    """A record as the estimator takes it."""
    usable, arm = not record.flags, record.arm
    copying = None
    if arm.ngram:
        plan = Plan(arm.draft_length, NGRAM_MATCH, NGRAM_TOKENS)
        runs = tuple(CopiedRun(*run) for run in record.ngram_runs)
        copying = Copies(
            *(plan, record.batch_size, record.num_drafting_rows, record.num_verified_tokens, runs, usable, True)
        )
    histogram = record.accepted_histogram
    return StepObservation(
        *(record.batch_size, len(histogram) - 1, record.latency_s, histogram, record.mean_context_length),
        *(usable and not arm.ngram, not arm.ngram, record.class_histograms),
        copying=copying,
        reviews=tuple(OutputReview(*output) for output in record.outputs),
    )
