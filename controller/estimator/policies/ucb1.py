"""UCB1 in every bucket by itself (Auer, Cesa-Bianchi and Fischer 2002).

The reward is goodput over the largest seen so far, so that it lies in [0, 1] as the bonus assumes.
"""

from __future__ import annotations

import math

from speclen.controller.estimator.policies.cells import CellPolicy


class Ucb1Policy(CellPolicy):
    """Mean reward plus sqrt(2 ln n / n_s), each length tried once first."""

    def pull(self, bucket: int) -> int:
        """The length with the highest upper bound."""
        steps = self.num_steps[bucket]
        if not steps.all():
            return int(steps.argmin())
        goodput = self.tokens[bucket] / self.seconds[bucket]
        bonus = (2.0 * math.log(steps.sum()) / steps) ** 0.5
        return int((goodput / goodput.max() + bonus).argmax())
