"""What prompts cost that no step without them shows: every token that is put out bears a share of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from speclen.controller.estimator.choice import PromptShare
from speclen.controller.estimator.core import StepObservation

# Tokens put out over which costs are averaged, and tokens without any that they start from.
MEMORY_TOKENS, PRIOR_TOKENS = 20_000.0, 500.0
# One report cannot count more, in times of its step: prompts of all rows may have come before the first step.
LARGEST_SHARE = 20.0
# Steps that a new row waits through before its first token: the one that feeds its prompt, and a part of the one it came in.
# Long prompts wait longer, but so they do for their turn: where queues decide, tokens per second count again.
WAITED_STEPS = 1.25
# Tokens of a worker's own that a new row of it must come with, on average, to be counted, and new rows that are counted at
# once: a worker that makes rows up would shorten everybody's steps. Workers of which that is remembered.
LEAST_TOKENS, AT_ONCE, REMEMBERED = 8.0, 64.0, 256


class Prompts:
    """Seconds of the draft model's prompts, and tokens that requests put out meanwhile; rows that were new in a step in
    which others decoded, and tokens that were put out in all. allowed: new rows that would be counted now, by worker.
    """

    STATE = ("seconds", "drafting_tokens", "new_rows", "tokens", "allowed")

    def __init__(self) -> None:
        self.allowed: dict[str, float] = {}
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
        numbers = self.seconds, self.drafting_tokens, self.new_rows, self.tokens, *self.allowed.values()
        return all(map(math.isfinite, numbers))

    def learn(self, steps: Iterable[StepObservation], worker: str = "") -> None:
        """Learn from steps of a worker. Of the draft model those tell that were to draft: else it is fed no prompts."""
        seconds = drafting = new_rows = tokens = 0.0
        for step in steps:
            told, new = step.copying, put_out(step)
            tokens += new
            new_rows += step.num_new_rows
            if step.speculation_length if told is None else told.plan.draft_length:
                drafting += new
                seconds += min(step.draft_prompt_s, LARGEST_SHARE * step.latency_s * step.num_steps)
        allowed = min(self.allowed.pop(worker, AT_ONCE) + tokens / LEAST_TOKENS, AT_ONCE)
        new_rows = min(new_rows, allowed)
        self.allowed[worker] = allowed - new_rows
        if len(self.allowed) > REMEMBERED:
            del self.allowed[next(iter(self.allowed))]
        if tokens:
            kept = math.exp(-tokens / MEMORY_TOKENS)
            self.new_rows, self.tokens = kept * self.new_rows + new_rows, kept * self.tokens + tokens
        if drafting:
            kept = math.exp(-drafting / MEMORY_TOKENS)
            self.seconds = kept * self.seconds + seconds
            self.drafting_tokens = kept * self.drafting_tokens + drafting


def put_out(step: StepObservation) -> int:
    """Tokens of all rows."""
    tokens = sum((run + 1) * rows for run, rows in enumerate(step.accepted_histogram))
    return tokens + (0 if step.copying is None else sum(run.num_accepted * run.num_rows for run in step.copying.runs))
