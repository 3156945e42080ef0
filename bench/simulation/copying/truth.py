"""What every plan is worth in the long run, in simulated texts on a simulated machine.

Of recorded texts it is exact but for which rows meet in a step: all steps that a plan takes through all of them are known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.bench.simulation.copying.machine import CopyingMachine
from speclen.bench.simulation.copying.recorded import RecordedTexts
from speclen.bench.simulation.copying.world import Text
from speclen.controller.estimator.plans.plan import Plan

# Rows and steps by which made-up texts are known, after those in which rows find their usual places.
KNOWN_ROWS, WARM_STEPS, KNOWN_STEPS = 1024, 30, 60
SAMPLED_STEPS = 1000  # of each batch size


class Worth(NamedTuple):
    """tokens: per row and step by plan; seconds: of a step by plan and batch size."""

    tokens: dict[Plan, float]
    seconds: dict[tuple[Plan, int], float]

    def best(self, size: int) -> float:
        """Least mean seconds per token and row."""
        return min(self.seconds[plan, size] / tokens for plan, tokens in self.tokens.items())


def worth_of(text: Text | RecordedTexts, machine: CopyingMachine, sizes: list[int], plans: list[Plan]) -> Worth:
    """Of these plans at these batch sizes."""
    worth = Worth({}, {})
    for plan in plans:
        steps = text.all_steps(plan) if isinstance(text, RecordedTexts) else _simulated(text, plan)
        worth.tokens[plan] = float(steps[2].mean())
        for size in sizes:
            chosen = np.random.default_rng(size).integers(0, steps.shape[1], (SAMPLED_STEPS, size))
            proposed, drafted = steps[0][chosen], steps[1][chosen]
            verified = size + proposed.sum(axis=1) + drafted.sum(axis=1)
            seconds = machine.seconds(size, drafted.max(axis=1), (drafted > 0).sum(axis=1), verified)
            worth.seconds[plan, size] = float(seconds.mean())
    return worth


def _simulated(text: Text, plan: Plan) -> np.ndarray:
    """Copies and drafts that rows propose, and tokens that they put out, [3, steps]."""
    rows = text.rows(KNOWN_ROWS, np.random.default_rng(1))
    steps = [rows.step(plan, KNOWN_ROWS) for _ in range(WARM_STEPS + KNOWN_STEPS)][WARM_STEPS:]
    return np.concatenate([np.stack([done.proposed, done.drafted, done.tokens]) for done in steps], axis=1)
