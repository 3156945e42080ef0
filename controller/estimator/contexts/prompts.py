"""What prompts cost that no step without them shows: every token that is put out bears a share of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from speclen.controller.estimator.allowance import Allowance
from speclen.controller.estimator.choice import PromptShare
from speclen.controller.estimator.core import StepObservation

# Tokens put out over which costs are averaged, and tokens without any that they start from.
MEMORY_TOKENS, PRIOR_TOKENS = 20_000.0, 500.0
# One report cannot count more, in times of its step: prompts of all rows may have come before the first step. In the long
# run prompts of a worker count as so many of its steps, beyond which hardly any length pays, and so many at once.
LARGEST_SHARE, MOST_STEPS, STEPS_AT_ONCE = 20.0, 2.0, 200.0
# Steps that a new row waits through before its first token: the one that feeds its prompt, and a part of the one it came in.
# Long prompts wait longer, but so they do for their turn: where queues decide, tokens per second count again.
WAITED_STEPS = 1.25
# Tokens of a worker's own that a new row of it must come with, on average, to be counted, and new rows that are counted at
# once: a worker that makes rows up would shorten everybody's steps.
LEAST_TOKENS, ROWS_AT_ONCE = 8.0, 64.0


def as_told(step: StepObservation) -> float:
    """Seconds of a step, where nothing is known of it but what its worker says."""
    return step.latency_s


class Prompts:
    """Seconds of the draft model's prompts, and tokens that requests put out meanwhile; rows that were new in a step in
    which others decoded, and tokens that were put out in all.

    All fade with every token: what is not drafted with any more is not known any more, and may be tried again.
    """

    STATE = ("seconds", "drafting_tokens", "new_rows", "tokens", "steps_allowed", "rows_allowed")

    def __init__(self) -> None:
        self.steps_allowed, self.rows_allowed = Allowance(STEPS_AT_ONCE), Allowance(ROWS_AT_ONCE)
        self.seconds = self.drafting_tokens = self.new_rows = self.tokens = 0.0

    @property
    def share(self) -> PromptShare:
        """What a token bears."""
        return PromptShare(
            self.seconds / (self.drafting_tokens + PRIOR_TOKENS),
            WAITED_STEPS * self.new_rows / (self.tokens + PRIOR_TOKENS),
        )

    @property
    def sound(self) -> bool:
        """Whether the numbers are some."""
        numbers = self.seconds, self.drafting_tokens, self.new_rows, self.tokens
        return all(map(math.isfinite, numbers)) and self.steps_allowed.sound and self.rows_allowed.sound

    def learn(
        self,
        steps: Iterable[StepObservation],
        worker: str = "",
        usual_s: Callable[[StepObservation], float] = as_told,
    ) -> None:
        """Learn from steps of a worker. Of the draft model those tell that were to draft: else it is fed no prompts.

        usual_s: seconds that such a step usually takes. The worker's own may hold a pause, and would let that count, too.
        """
        seconds = in_steps = drafting = new_rows = tokens = 0.0
        num_steps = 0
        for step in steps:
            told, new = step.copying, step.num_tokens
            tokens += new
            new_rows += step.num_new_rows
            if step.speculation_length if told is None else told.plan.draft_length:
                drafting += new
                num_steps += step.num_steps
                if step.draft_prompt_s:
                    usual = max(min(step.latency_s, usual_s(step)), 1e-9)
                    counted = min(step.draft_prompt_s, LARGEST_SHARE * usual * step.num_steps)
                    seconds += counted
                    in_steps += counted / usual
        new_rows = self.rows_allowed.take(worker, tokens / LEAST_TOKENS, new_rows)
        believed = self.steps_allowed.take(worker, MOST_STEPS * num_steps, in_steps)
        if tokens:
            kept = math.exp(-tokens / MEMORY_TOKENS)
            self.new_rows, self.tokens = kept * self.new_rows + new_rows, kept * self.tokens + tokens
            self.seconds = kept * self.seconds + (seconds * believed / in_steps if in_steps else 0.0)
            self.drafting_tokens = kept * self.drafting_tokens + drafting
