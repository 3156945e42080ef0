"""A simulated machine and text, whose steps take no real time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_LENGTH = 8


@dataclass(frozen=True)
class World:
    """True means. acceptance: of each draft token after accepted ones; draft_s: seconds of a draft pass."""

    acceptance: float = 0.75
    draft_s: float = 0.0015
    noise: float = 0.03

    def step_s(self, batch_size: int, length: int) -> float:
        """Mean step time: overhead, draft passes, and a verifying pass that grows beyond 60 tokens."""
        return 0.002 + self.draft_s * length + 0.020 * max(1.0, batch_size * (length + 1) / 60.0)

    def survival(self) -> list[float]:
        """Probability that the first 1, 2, ... draft tokens are all accepted."""
        return [self.acceptance**at for at in range(1, MAX_LENGTH + 1)]

    def tokens(self, length: int) -> float:
        """Mean tokens per sequence and step."""
        return 1.0 + sum(self.survival()[:length])

    def goodput(self, batch_size: int, length: int) -> float:
        """Mean tokens per sequence and second."""
        return self.tokens(length) / self.step_s(batch_size, length)

    def shortfall(self, batch_size: int, length: int) -> float:
        """Share of the oracle's goodput that a length loses."""
        best = max(self.goodput(batch_size, length) for length in range(MAX_LENGTH + 1))
        return 1.0 - self.goodput(batch_size, length) / best

    def lost_s(self, batch_size: int, length: int, choice: int) -> float:
        """Expected seconds lost by a step against the table's choice for the same tokens; at least 0."""
        usual_s = self.tokens(length) / self.goodput(batch_size, choice)
        return max(0.0, self.step_s(batch_size, length) - usual_s)

    def draw(self, batch_size: int, length: int, dice: np.random.Generator) -> tuple[float, tuple[int, ...]]:
        """Seconds of one step, with noise, and its sequences by accepted run."""
        runs = np.minimum(dice.geometric(1.0 - self.acceptance, size=batch_size) - 1, length)
        latency_s = self.step_s(batch_size, length) * float(np.exp(self.noise * dice.standard_normal()))
        return latency_s, tuple(np.bincount(runs, minlength=length + 1).tolist())
