"""Which length to play in each bucket, and which exploratory step to pay for.

The length with the most expected tokens per second is played, where a time that is hardly known counts as longer than its
best guess, so that a choice needs evidence in proportion to what it risks. Any length teaches about all others, so
exploring is rarely needed, and never free: a bucket earns a small share of the time it spends, and a probe is handed out
only when its expected loss has been earned before. So exploring costs at most that share of all time, plus a few steps per
bucket. Length 0 shows nothing of acceptance, hence its larger share and an account that starts filled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.times.step_time import StepTimes, mean_seconds

# Relative gain in goodput that a change of length must promise: against flapping between near-ties.
MARGIN = 0.002
# Part of the variance of log time by which an unsure length counts as slower. 0.5 would be the mean of a lognormal time;
# more, since a first use of a shape costs and what is known improves by itself.
RISK = 1.0
# Steps over which leaving length 0 must pay for what the draft's catching up costs.
RESUME_HORIZON = 100.0
# Share of a bucket's time that probes may cost where drafting is on, and off; the most that can be saved up, in steps.
SHARE, SHARE_AT_ZERO = 0.001, 0.003
CAP_STEPS, CAP_STEPS_AT_ZERO = 1.0, 4.0
# What a probe costs beyond its steps where it takes two, in steps: there and back, passes of another size take longer.
CHANGE = 0.25
# Standard deviations of optimism by which a probe is picked, and the least it is charged, in steps: a guess is a guess.
OPTIMISM, LEAST_CHARGE = 1.5, 0.02
# A probe at length 0 takes a second step unless the step time is known this well, relative to length 0 (log-sd), from this
# many reports of its own.
KNOWN_SD, KNOWN_REPORTS = 0.06, 3.0
# Reports after which it is not known any more if no bucket has played it: a draft that was slow may be fast again.
KNOWN_FOR = 500.0
# Log-sd by which plain decoding may be quicker than what drafting steps say of it, and reports over which it is forgotten
# that it was tried: that anything is drafted can cost a jump, such as other kernels, which no sum of weights can tell.
UNTRIED_SD, TRIED_REPORTS = 0.5, 2000.0
# Reports of all buckets over which that doubt begins.
UNTRIED_AFTER = 1000.0
# Log time by which a probe must be quicker than believed for some of its charge to be given back, and standard deviations
# of a step's noise.
REFUNDED, REFUNDED_NOISE = 0.25, 2.0
# Length before anything is known.
COLD_LENGTH = 2


class PromptShare(NamedTuple):
    """What prompts cost that no step without them shows, per token that a request puts out.

    draft_s: that the draft model is fed its prompt, where it drafts. steps: that it waits through for its first token, and
    has to wait for as long as they take: a request of 64 tokens that waits for two steps is done sooner with shorter steps
    that make 2% fewer tokens per second.
    """

    draft_s: float = 0.0
    steps: float = 0.0

    def borne(
        self, step_s: FloatArray, tokens: FloatArray, rows: FloatArray | np.ndarray, drafts: np.ndarray
    ) -> FloatArray:
        """Step times that bear the shares of what a step puts out. tokens: per row; drafts: whether the draft model runs."""
        borne: FloatArray = step_s * (1.0 + self.steps * tokens) + self.draft_s * rows * tokens * drafts
        return borne


NO_PROMPTS = PromptShare()


class LengthChoice:
    """Lengths by bucket and their accounts. Arrays are [buckets]; credit is expected loss, in steps of the bucket."""

    STATE = (
        "lengths",
        "credit",
        "charged",
        "owed",
        "lasted",
        "to_follow",
        "surprising",
        "zero_filled",
        "decided",
        "probe_s",
    )

    def __init__(self, num_buckets: int, max_length: int) -> None:
        self.buckets = np.arange(num_buckets)
        self.lengths = np.full(num_buckets, min(COLD_LENGTH, max_length))
        self.credit = np.zeros(num_buckets)
        # Of the last probe: what it was charged and was not given back, what of that no estimate changes, and its steps.
        self.charged, self.owed, self.lasted = np.zeros((3, num_buckets))
        self.to_follow = np.zeros(num_buckets, dtype=bool)
        self.zero_filled = np.zeros(num_buckets, dtype=bool)
        self.surprising = np.zeros(num_buckets, dtype=bool)  # the last probe was quicker than is believed of it
        self.decided = False
        self.probe_s = 0.0  # expected loss of all probes so far
        self._step_s: FloatArray | None = None
        self._seconds: FloatArray | None = None

    def assess(self, tokens: FloatArray, times: StepTimes, prompts: PromptShare = NO_PROMPTS) -> None:
        """Take the newest estimates. tokens: expected, per row and step, [buckets, lengths]."""
        self.tokens, self.doubt = tokens, RISK * times.grid(times.variance)
        self._believed, self._step_s, self._seconds = (times.log_seconds, times.noise), None, None
        self._rows, self._prompts = times.grid(times.rows), prompts

    @property
    def step_s(self) -> FloatArray:
        """Mean step times by the estimates that the choice rests on, [buckets, lengths]."""
        if self._step_s is None:
            self._step_s = mean_seconds(*self._believed).reshape(self.tokens.shape)
        return self._step_s

    @property
    def seconds(self) -> FloatArray:
        """The same with their share of prompts: what lengths are judged by."""
        if self._seconds is None:
            self._seconds = self.step_s
            if any(self._prompts):
                drafts = np.arange(self.tokens.shape[1]) > 0
                self._seconds = self._prompts.borne(self.step_s, self.tokens, self._rows, drafts)
        return self._seconds

    @property
    def goodput(self) -> FloatArray:
        """Expected tokens per row and second, likewise."""
        return self.tokens / self.seconds

    def decide(self, tokens: FloatArray, times: StepTimes, resume_s: float, prompts: PromptShare = NO_PROMPTS) -> None:
        """Choose by the newest estimates. resume_s: that drafting takes longer after length 0."""
        if not times.known:
            return
        at, now = self.buckets, self.lengths
        self.assess(tokens, times, prompts)
        log_s = np.log(self.seconds) if any(prompts) else times.grid(times.log_seconds)
        cautious = np.log(tokens) - log_s - self.doubt
        best: np.ndarray = cautious.argmax(axis=1)
        needed: FloatArray | float = MARGIN
        if resume_s:
            needed = MARGIN + (now == 0) * (resume_s / RESUME_HORIZON) / self.seconds[:, 0]
        if self.decided:
            better = cautious[at, best] > cautious[at, now] + needed
            self.lengths = np.where(better, best, now) if better.any() else now
        else:
            self.lengths, self.decided = best, True
        for bucket in (self.credit < 0.0).nonzero()[0].tolist():
            self._reckon_again(bucket)
        fresh = (self.lengths == 0) & ~self.zero_filled
        self.credit[fresh] = CAP_STEPS_AT_ZERO
        self.zero_filled |= fresh

    def loss(self, bucket: int) -> FloatArray:
        """Expected loss, in steps, of playing each length once instead of the choice."""
        chosen, goodput = self.lengths[bucket], self.goodput[bucket]
        loss: FloatArray = self.seconds[bucket] / self.seconds[bucket, chosen] * (1.0 - goodput / goodput[chosen])
        return loss

    def earn(self, buckets: np.ndarray, count: FloatArray) -> None:
        """Earn credit for reports of these buckets, each of so many steps."""
        off = self.lengths == 0
        share: FloatArray | float = SHARE
        cap: FloatArray | float = CAP_STEPS
        if off.any():
            share, cap = np.where(off, SHARE_AT_ZERO, SHARE), np.where(off, CAP_STEPS_AT_ZERO, CAP_STEPS)
        self.credit += np.bincount(buckets, count, len(off)) * share
        np.minimum(self.credit, cap, out=self.credit)

    def refund(self, cell: np.ndarray, surprise: FloatArray) -> None:
        """Probes that were much quicker than was believed lost less than they were charged: the next may follow at once.

        cell: of each report; surprise: its log time over what was believed, at the speed of the moment. Else a draft that
        was slow for a while would be tried once in a thousand steps, by what is wrongly believed of it, and a few times are
        needed to believe it.
        """
        bucket, length = np.divmod(cell, self.tokens.shape[1])
        quick = (surprise < -max(REFUNDED, REFUNDED_NOISE * self._believed[1])) & (length != self.lengths[bucket])
        if quick.any():
            self.surprising[bucket[quick]] = True
            bucket, length = bucket[quick], length[quick]
            share = self.seconds[bucket, length] / self.seconds[bucket, self.lengths[bucket]]
            back = np.bincount(bucket, share * -np.expm1(surprise[quick]), len(self.credit))
            back = np.minimum(back, self.charged)
            self.charged -= back
            self.credit += back
            np.minimum(self.credit, np.where(self.lengths == 0, CAP_STEPS_AT_ZERO, CAP_STEPS), out=self.credit)

    def probe(self, bucket: int, times: StepTimes, resume_s: float, longest: int, num_steps: int = 1) -> int | None:
        """An exploratory length, at most longest, of which the bucket can pay so many steps, charged to it; mostly None."""
        if not self.decided or longest < 1:
            return None
        if self.lengths[bucket] == 0:
            return self._probe_at_zero(bucket, times, resume_s, longest, num_steps)
        return self._probe_optimist(bucket, times, longest, num_steps)

    def _probe_optimist(self, bucket: int, times: StepTimes, longest: int, num_steps: int) -> int | None:
        """The length that could most plausibly be better than the choice, if its expected loss has been earned."""
        chosen, credit = int(self.lengths[bucket]), float(self.credit[bucket])
        if credit < least_cost(num_steps):
            return None
        goodput = self.goodput[bucket]
        variance = times.relative_variance(bucket, chosen)
        variance[0] += untried_sd(times) ** 2
        hope = np.log(goodput / goodput[chosen]) + OPTIMISM * np.sqrt(variance)
        hope[chosen] = hope[longest + 1 :] = -np.inf
        costs = least_costs(num_steps, self.loss(bucket))
        hope[costs > CAP_STEPS] = -np.inf  # it would wait for ever, and all others with it
        candidate: int | None = int(hope.argmax())
        if hope[candidate] <= 0.0:
            candidate = oldest_of(bucket, times, costs, credit, chosen, longest) if credit >= CAP_STEPS else None
        if candidate is None or costs[candidate] > credit:
            return None
        self.charge(bucket, float(costs[candidate]), num_steps)
        return candidate

    def _probe_at_zero(
        self, bucket: int, times: StepTimes, resume_s: float, longest: int, num_steps: int
    ) -> int | None:
        """One draft token, to see whether drafting would pay again, and then the length that is thought to cost least.

        In the first of the two steps the draft catches up, so it teaches acceptance alone. Without the second one, times
        that are wrongly believed to be long would keep drafting off for ever. Times that are known need none.
        """
        loss = self.loss(bucket)
        second = 1 + int(loss[1 : longest + 1].argmin())
        if self.to_follow[bucket]:
            self.to_follow[bucket] = False
            return second
        resume = resume_s / float(self.seconds[bucket, 0])
        cost = least_cost(num_steps, float(loss[1])) + resume
        # A full account pays for one probe however dear, and is in debt for it: what is believed of drafting may be wrong.
        if cost > self.credit[bucket] and self.credit[bucket] < CAP_STEPS_AT_ZERO:
            return None
        seen = times.grid(times.evidence)[bucket, second] >= KNOWN_REPORTS
        fresh = times.clock - times.grid(times.seen_at)[:, second].max() < KNOWN_FOR
        surprising, self.surprising[bucket] = self.surprising[bucket], False
        if not seen or not fresh or surprising or times.relative_variance(bucket, 0)[second] > KNOWN_SD**2:
            # Both are charged now. What that overdraws is earned back before the next.
            self.to_follow[bucket] = True
            cost += num_steps * max(float(loss[second]), LEAST_CHARGE)
        self.charge(bucket, cost, num_steps, resume=resume)
        return 1

    def _reckon_again(self, bucket: int) -> None:
        """A debt is what the probe costs by the newest estimates: times wrongly believed to be long owe nothing.

        What does not hang on those is owed in any case: that the draft caught up, and there and back.
        """
        owed = float(self.owed[bucket])
        if self.lengths[bucket]:
            left = min(0.0, CAP_STEPS - owed)
        else:
            dear = self.lasted[bucket] * np.maximum(self.loss(bucket)[1:], LEAST_CHARGE)
            left = CAP_STEPS_AT_ZERO - float(dear[0] + dear.min()) - owed
        forgiven = max(0.0, left - float(self.credit[bucket]))
        self.credit[bucket] += forgiven
        self.charged[bucket] = max(0.0, float(self.charged[bucket]) - forgiven)

    def charge(
        self, bucket: int, cost: float, num_steps: int, usual_s: float | None = None, resume: float = 0.0
    ) -> None:
        """A probe of num_steps is expected to lose so many usual steps, resume of them for the draft to catch up.

        usual_s: of a usual one; None: at the length that is played.
        """
        self.credit[bucket] -= cost
        self.charged[bucket], self.lasted[bucket] = cost, num_steps
        self.owed[bucket] = resume + CHANGE * (num_steps > 1)
        self.probe_s += cost * (float(self.seconds[bucket, self.lengths[bucket]]) if usual_s is None else usual_s)


def untried_sd(times: StepTimes) -> float:
    """Doubt about plain decoding, in log time: less with every report of it, of any bucket, and none in the first minutes,
    which have enough to find out.
    """
    age = times.clock - times.grid(times.seen_at)[:, 0]
    num_plain = float(times.grid(times.evidence)[:, 0] @ np.exp(-age / TRIED_REPORTS))
    return UNTRIED_SD * -math.expm1(-times.clock / UNTRIED_AFTER) / (1.0 + num_plain)


def oldest_of(bucket: int, times: StepTimes, costs: FloatArray, credit: float, played: int, longest: int) -> int | None:
    """The length of which what is known is oldest, of those that can be paid, or None.

    What is sure may not be true any more: a change of all lengths is found by what is played, one of the others is not.
    """
    last = np.where(times.grid(times.evidence)[bucket] > 0.0, times.grid(times.seen_at)[bucket], -1.0)
    last[costs > credit] = last[played] = last[longest + 1 :] = np.inf
    oldest = np.lexsort((costs, last))[0]
    return int(oldest) if np.isfinite(last[oldest]) else None


def least_cost(num_steps: int, loss: float = 0.0) -> float:
    """Of a probe of so many steps, each of which is expected to lose so much, in steps."""
    return float(least_costs(num_steps, np.array(loss)))


def least_costs(num_steps: int, losses: FloatArray) -> FloatArray:
    """The same of several."""
    costs: FloatArray = num_steps * np.maximum(losses, LEAST_CHARGE) + CHANGE * (num_steps > 1)
    return costs
