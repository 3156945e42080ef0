"""Workers of a context that share one model of step times and one of acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from speclen.controller.estimator.acceptance import Acceptance
from speclen.controller.estimator.choice import LengthChoice
from speclen.controller.estimator.core import Decision, StepObservation
from speclen.controller.estimator.plans.choice import PlanChoice
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.times.step_time import StepTimes


class Group:
    """Workers that are alike: what is believed about them, and what they play."""

    STATE = ("choice", "version", "lengths", "drafts_next")

    def __init__(
        self, times: StepTimes, acceptance: Acceptance, choice: LengthChoice, plans: PlanChoice | None = None
    ) -> None:
        self.times, self.acceptance, self.choice, self.plans = times, acceptance, choice, plans
        self.version = 0
        self.drafts_next = np.zeros(len(choice.lengths), dtype=bool)  # whether the next probe there is to draft
        self.seen = -1, -1, -1  # versions of times, acceptance and plans that the choice rests on
        self.lengths: list[int] = []
        self.last_decision: dict[int, Decision] = {}

    @property
    def newest(self) -> tuple[int, int, int]:
        """Versions of step times, acceptance and what plans rest on by now."""
        return self.times.version, self.acceptance.version, 0 if self.plans is None else self.plans.version

    @property
    def played(self) -> Sequence[Plan | int]:
        """By bucket: a length, or a plan that copies."""
        if self.plans is None:
            return self.lengths
        return [plan or length for length, plan in zip(self.lengths, self.plans.chosen, strict=False)]

    def usual_s(self, step: StepObservation) -> float:
        """Seconds that a step of this length usually takes; its own while nothing is decided."""
        if not self.choice.decided:
            return step.latency_s
        return float(self.choice.step_s[self.times.bucket_of[step.batch_size], step.speculation_length])
