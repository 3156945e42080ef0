"""What prompts cost that no step without them shows: every token that is put out bears a share of it.

Nothing that a worker does could contradict what it says of this, so each has one vote, and the lower median counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from statistics import median_low

from speclen.controller.estimator.allowance import Allowance
from speclen.controller.estimator.choice import NO_PROMPTS, PromptShare
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.reports import OTHERS

# Tokens put out by a worker over which its costs are averaged, and tokens without any that they start from, before which it
# has no vote.
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
# Workers that have a vote each; all others have one together.
MOST_VOTES = 128
# Places in the sums of a worker.
SECONDS, DRAFTING_TOKENS, NEW_ROWS, TOKENS = range(4)


def as_told(step: StepObservation) -> float:
    """Seconds of a step, where nothing is known of it but what its worker says."""
    return step.latency_s


class Prompts:
    """By worker, seconds of the draft model's prompts, and tokens that requests put out meanwhile; rows that were new in a
    step in which others decoded, and tokens that were put out in all.

    All fade with every token of the worker: what it does not draft with any more is not known any more, and may be tried
    again.
    """

    STATE = ("sums", "steps_allowed", "rows_allowed")

    def __init__(self) -> None:
        self.steps_allowed, self.rows_allowed = Allowance(STEPS_AT_ONCE), Allowance(ROWS_AT_ONCE)
        self.sums: dict[str, list[float]] = {}

    @property
    def share(self) -> PromptShare:
        """What a token bears."""
        if not self.sums:
            return NO_PROMPTS
        heard = [sums for sums in self.sums.values() if sums[TOKENS] >= PRIOR_TOKENS] or list(self.sums.values())
        return PromptShare(
            median_low([sums[SECONDS] / (sums[DRAFTING_TOKENS] + PRIOR_TOKENS) for sums in heard]),
            WAITED_STEPS * median_low([sums[NEW_ROWS] / (sums[TOKENS] + PRIOR_TOKENS) for sums in heard]),
        )

    @property
    def sound(self) -> bool:
        """Whether the numbers are some."""
        numbers = [number for sums in self.sums.values() for number in sums]
        whole = len(numbers) == 4 * len(self.sums) and all(map(math.isfinite, numbers))
        return whole and self.steps_allowed.sound and self.rows_allowed.sound

    def keep(self, workers: Container[str]) -> None:
        """All but these have gone, and have no vote any more."""
        for worker in [each for each in self.sums if each != OTHERS and each not in workers]:
            del self.sums[worker]

    def _sums_of(self, worker: str) -> list[float]:
        known = worker in self.sums or len(self.sums) < MOST_VOTES
        return self.sums.setdefault(worker if known else OTHERS, [0.0, 0.0, 0.0, 0.0])

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
            kept, sums = math.exp(-tokens / MEMORY_TOKENS), self._sums_of(worker)
            news = seconds * believed / in_steps if in_steps else 0.0, drafting, new_rows, tokens
            sums[:] = [kept * before + new for before, new in zip(sums, news, strict=True)]
