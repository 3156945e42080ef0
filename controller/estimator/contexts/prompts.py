"""What the draft model's prompts take: lengths and plans that draft must bear it, and no step's time tells it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from speclen.controller.estimator.core import StepObservation

# Tokens put out over which the cost is averaged, and tokens without any that it starts from.
MEMORY_TOKENS, PRIOR_TOKENS = 20_000.0, 500.0
# One report cannot count more, in times of its step: prompts of all rows may have come before the first step.
LARGEST_SHARE = 20.0


class DraftPrompts:
    """Seconds of the draft model's prompts, and tokens that requests put out meanwhile."""

    STATE = ("seconds", "tokens")

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0.0

    @property
    def s_per_token(self) -> float:
        """Seconds per token that a request puts out while lengths and plans that draft are played."""
        return self.seconds / (self.tokens + PRIOR_TOKENS)

    @property
    def sound(self) -> bool:
        """Whether the numbers are some."""
        return math.isfinite(self.seconds + self.tokens)

    def learn(self, steps: Iterable[StepObservation]) -> None:
        """Learn from steps that were to draft: prompts of others go through the target alone."""
        seconds = tokens = 0.0
        for step in steps:
            told = step.copying
            if not (step.speculation_length if told is None else told.plan.draft_length):
                continue
            tokens += sum((run + 1) * rows for run, rows in enumerate(step.accepted_histogram))
            if told is not None:
                tokens += sum(run.num_accepted * run.num_rows for run in told.runs)
            seconds += min(step.draft_prompt_s, LARGEST_SHARE * step.latency_s * step.num_steps)
        if tokens:
            kept = math.exp(-tokens / MEMORY_TOKENS)
            self.seconds, self.tokens = kept * self.seconds + seconds, kept * self.tokens + tokens
