"""Rare slow steps: how much time they add on average, and whether they grow with the step or come on top of it.

A clipped update rightly ignores a step of ten times its usual length. But the time is spent, and what it does to the
choice depends on its kind: if slow steps are k times their usual time, all lengths suffer alike; if a pause of 200 ms
comes on top, longer lengths share it among more tokens. So the excess of such steps is modelled as c T^beta, and beta
is estimated from how the excess varies with the predicted time: 1 for factors, 0 for pauses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speclen.controller.estimator.arrays import FloatArray

# Steps after which the sums have faded to 1/e; slow steps are rare, so the memory is long.
MEMORY_STEPS = 4000.0
# Weight of the prior beta = 1, in slow steps times variance of log T: a spread of 0.6 in log excess, sd 0.5 of beta.
PRIOR_WEIGHT = 1.5
# Steps without a slow one that the rate starts from.
PRIOR_STEPS = 20.0


@dataclass(slots=True)
class SlowSteps:
    """Fading sums over slow steps. sums: number, log T, log T squared, log excess, log T * log excess, excess."""

    num_steps: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 6)
    # Seen since the drift detector last rested: kept aside, since a drift looks like slow steps at first.
    waiting: list[tuple[float, float]] = field(default_factory=list)

    def add(self, num_steps: int, slow: list[tuple[float, float]], settled: bool, drifted: bool) -> None:
        """Count a group. slow: (predicted time, excess) in seconds; settled, drifted: what the detector says."""
        if drifted:
            self.waiting.clear()
            return
        fade = math.exp(-num_steps / MEMORY_STEPS)
        self.num_steps = self.num_steps * fade + num_steps
        self.sums = [value * fade for value in self.sums]
        self.waiting += slow
        if not settled:
            del self.waiting[:-256]  # a detector that never rests must not fill the memory
            return
        for predicted, excess in self.waiting:
            log_time, log_excess = math.log(predicted), math.log(excess)
            terms = (1.0, log_time, log_time * log_time, log_excess, log_time * log_excess, excess)
            self.sums = [value + term for value, term in zip(self.sums, terms, strict=True)]
        self.waiting.clear()

    @property
    def share(self) -> float:
        """Share of steps that are slow."""
        return self.sums[0] / (self.num_steps + PRIOR_STEPS)

    @property
    def exponent(self) -> float:
        """beta: 1 where slow steps are multiples of the usual time, 0 where a pause comes on top."""
        number, times, times_squared, excesses, product, _ = self.sums
        if number < 2.0:
            return 1.0
        spread = max(times_squared - times * times / number, 0.0)
        joint = product - times * excesses / number
        return min(max((joint + PRIOR_WEIGHT) / (spread + PRIOR_WEIGHT), 0.0), 1.0)

    def mean_excess(self, step_s: FloatArray) -> FloatArray:
        """Time that slow steps add on average to steps that usually take step_s, in seconds."""
        number, times, _, _, _, excess = self.sums
        if number < 2.0:
            return np.zeros_like(step_s)
        typical = math.exp(times / number)
        per_step = excess / (self.num_steps + PRIOR_STEPS)
        beta = self.exponent
        ratio = step_s * (1.0 / typical)
        scaled: FloatArray = ratio if beta == 1.0 else np.power(ratio, beta)
        return per_step * scaled

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        return {"num_steps": self.num_steps, "sums": self.sums, "waiting": [list(pair) for pair in self.waiting]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state."""
        self.num_steps, self.sums = float(state["num_steps"]), [float(value) for value in state["sums"]]
        self.waiting = [(float(first), float(second)) for first, second in state["waiting"]]
