"""Some dozens of steps of the best length that drafts in a row, now and then, where a plan that copies is played.

A step that copies ends where copies were wrong, so lengths that are tried for a step or two meet harder text than they
would if they were played on and on, for a dozen steps. What is believed of lengths by such steps alone would keep plans in
their place that are worse. A stint lasts longer than that; its steps are as good as steady play's.

All buckets of a group share an account, since what a stint teaches of acceptance is shared, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.choice import LEAST_CHARGE, SHARE, LengthChoice
from speclen.controller.estimator.plans.plan import Plan

# Steps of a stint, of which a dozen meet harder text; fewer if a full account does not pay for them.
STINT_STEPS = 64
# Share of the time at plans that stints may cost; the most that can be saved up, in steps. The account starts full.
STINT_SHARE, STINT_CAP_STEPS = SHARE, 8.0
# Batch sizes at which a stint goes on: up to so many times as many rows, or as few, where its length is no worse than the
# best one by more than this.
WIDEST, WORST = 2.0, 0.05
UNASKED_S = 3600.0  # a full account before anybody asked, however long steps are


class Try(NamedTuple):
    """A plan that might be played: its log goodput over what is played, with optimism; seconds; tokens per row and s."""

    plan: Plan
    hope: float
    seconds: float
    goodput: float


class Stint(NamedTuple):
    """A length for so many steps, at the batch sizes of buckets first to last."""

    plan: Plan
    num_steps: int
    first: int
    last: int


def of_length(bucket: int, choice: LengthChoice, length: int, hope: float) -> Try:
    """A length without copies, as something that might be played."""
    return Try(Plan(length), hope, float(choice.seconds[bucket, length]), float(choice.goodput[bucket, length]))


class Stints:
    """What they may cost. rows: of each bucket; credit_s: expected loss that was earned, in seconds; longest_s: of the steps
    in which it was to be spent, so that it can be saved up for the longest ones.
    """

    STATE = ("credit_s", "longest_s")

    def __init__(self, rows: FloatArray) -> None:
        self.rows, self.credit_s, self.longest_s = rows, UNASKED_S, 0.0

    def earn(self, seconds: float) -> None:
        """Earn a share of time that was spent at plans that copy."""
        self.credit_s += STINT_SHARE * seconds

    def take(
        self, bucket: int, choice: LengthChoice, usual: Try, longest: int, resume: float, least_steps: int = 1
    ) -> Stint | None:
        """A stint of the best length that drafts, charged, once it has been earned; mostly None.

        Plain decoding puts out one token whatever the text. usual: the plan that is played in the bucket; longest: that the
        worker can do; resume: what it takes to draft again, in steps of the plan; least_steps: fewer tell nothing.
        """
        if not longest:
            return None
        length = 1 + int(choice.goodput[bucket, 1 : longest + 1].argmax())
        tried = of_length(bucket, choice, length, 0.0)
        loss = max(tried.seconds / usual.seconds * (1.0 - tried.goodput / usual.goodput), LEAST_CHARGE)
        resume = min(resume, STINT_CAP_STEPS / 2.0)
        self.longest_s = max(self.longest_s, usual.seconds)
        self.credit_s = min(self.credit_s, STINT_CAP_STEPS * self.longest_s)
        # All that can be saved up pays for fewer steps of what is thought to be much worse.
        num_steps = min(int((STINT_CAP_STEPS - resume) / loss), STINT_STEPS)
        cost_s = (num_steps * loss + resume) * usual.seconds
        if num_steps < least_steps or cost_s > self.credit_s:
            return None
        self.credit_s -= cost_s
        choice.probe_s += cost_s
        return Stint(Plan(length), num_steps, *self._where_as_good(bucket, choice, length))

    def _where_as_good(self, bucket: int, choice: LengthChoice, length: int) -> tuple[int, int]:
        """Buckets around this one, first and last, of whose lengths this is about the best, and not too far away."""
        goodput, rows = choice.goodput, self.rows / self.rows[bucket]
        good = goodput[:, length] >= (1.0 - WORST) * goodput[choice.buckets, choice.lengths]
        bad = np.flatnonzero(~good | (rows > WIDEST) | (rows < 1.0 / WIDEST))
        first = int(bad[bad < bucket].max(initial=-1)) + 1
        last = int(bad[bad > bucket].min(initial=len(good))) - 1
        return first, last
