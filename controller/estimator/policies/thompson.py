"""Thompson sampling in every bucket by itself, with a normal posterior of each length's goodput (ratio of sums)."""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.policies.cells import CellPolicy

# Spread of a step's goodput relative to its mean: acceptance and noise of a batch.
RELATIVE_SD = 0.5


class ThompsonPolicy(CellPolicy):
    """Draws a goodput for every length from what its steps say, and plays the highest."""

    def pull(self, bucket: int) -> int:
        """The length with the highest draw; each is tried once first."""
        steps = self.num_steps[bucket]
        if not steps.all():
            return int(steps.argmin())
        goodput = self.tokens[bucket] / self.seconds[bucket]
        draws = goodput * (1.0 + RELATIVE_SD / np.sqrt(steps) * self.rng.standard_normal(len(steps)))
        return int(draws.argmax())
