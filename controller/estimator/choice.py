"""Which length to play in each bucket, and which exploratory step to pay for.

The length with the most expected tokens per second is played, where a time that is hardly known counts as longer than its
best guess, so that a choice needs evidence in proportion to what it risks. Any length teaches about all others, so
exploring is rarely needed, and never free: a bucket earns a small share of the time it spends, and a probe is handed out
only when its expected loss has been earned before. So exploring costs at most that share of all time, plus a few steps per
bucket. Length 0 shows nothing of acceptance, hence its larger share and an account that starts filled.
"""

from __future__ import annotations

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.step_time import StepTimes

# Relative gain in goodput that a change of length must promise: against flapping between near-ties.
MARGIN = 0.002
# Part of the variance of log time by which an unsure length counts as slower. 0.5 would be the mean of a lognormal time;
# more, since a first use of a shape costs and what is known improves by itself.
RISK = 1.0
# Steps over which leaving length 0 must pay for what the draft's catching up costs.
RESUME_HORIZON = 100.0
# Share of a bucket's time that probes may cost where drafting is on, and off; the most that can be saved up, in steps, and
# what is there at the start without a profile of this very device.
SHARE, SHARE_AT_ZERO = 0.001, 0.003
CAP_STEPS, CAP_STEPS_AT_ZERO, START_STEPS = 1.0, 4.0, 0.0
# Standard deviations of optimism by which a probe is picked, and the least it is charged, in steps: a guess is a guess.
OPTIMISM, LEAST_CHARGE = 1.5, 0.02
# A probe at length 0 takes a second step unless the step time is known this well, relative to length 0 (log-sd).
KNOWN_SD = 0.06
# Acceptance that rises this far in the detector lets probes at length 0 follow at once, at most so many.
RISING, REPEATS = 1.0, 6
# Length before anything is known.
COLD_LENGTH = 2


class LengthChoice:
    """Lengths by bucket and their accounts. Arrays are [buckets]; credit is in seconds of expected loss."""

    STATE = ("lengths", "credit", "repeats_left", "to_follow", "zero_filled", "decided", "probe_s")

    def __init__(self, num_buckets: int, max_length: int) -> None:
        self.lengths = np.full(num_buckets, min(COLD_LENGTH, max_length))
        self.credit = np.zeros(num_buckets)
        self.repeats_left = np.full(num_buckets, REPEATS)
        self.to_follow = np.zeros(num_buckets, dtype=bool)
        self.zero_filled = np.zeros(num_buckets, dtype=bool)
        self.decided = False
        self.probe_s = 0.0  # expected loss of all probes so far

    def decide(self, tokens: FloatArray, times: StepTimes, resume_s: float) -> None:
        """Choose by the newest estimates. tokens: expected, per row and step, [buckets, lengths]."""
        if not times.known:
            return
        at = np.arange(len(self.lengths))
        self._estimate(tokens, times)
        cautious = np.log(self.goodput) - self.doubt
        best = cautious.argmax(axis=1)
        if self.decided:
            needed = np.full(len(at), MARGIN)
            resuming = (self.lengths == 0) & (best > 0)
            needed[resuming] += resume_s / (RESUME_HORIZON * self.seconds[resuming, 0])
            best = np.where(cautious[at, best] > cautious[at, self.lengths] + needed, best, self.lengths)
        self.lengths = best
        self._weigh()
        if not self.decided and not times.profiled_here:
            self.credit += START_STEPS * self.step_s
        self.decided = True

    def assess(self, tokens: FloatArray, times: StepTimes) -> None:
        """Bring estimates up to date and leave the lengths as they are."""
        self._estimate(tokens, times)
        self._weigh()

    def _estimate(self, tokens: FloatArray, times: StepTimes) -> None:
        self.seconds = times.seconds()
        self.goodput = tokens / self.seconds
        self.doubt = RISK * times.grid(times.variance)

    def _weigh(self) -> None:
        """What the lengths cost, and what departing from them would."""
        at = np.arange(len(self.lengths))
        self.step_s = self.seconds[at, self.lengths]
        # Expected loss, in seconds, of playing a length once instead of the choice.
        self.loss = self.seconds * (1.0 - self.goodput / self.goodput[at, self.lengths][:, None])

    def earn(self, buckets: np.ndarray, rising: float) -> None:
        """Earn credit for the steps of these buckets. rising: how far acceptance's detector has risen."""
        if not self.decided:
            return
        off = self.lengths == 0
        visits = np.bincount(buckets, minlength=len(off))
        self.credit += visits * np.where(off, SHARE_AT_ZERO, SHARE) * self.step_s
        fresh = off & ~self.zero_filled
        self.credit[fresh] = CAP_STEPS_AT_ZERO * self.step_s[fresh]
        self.zero_filled |= fresh
        np.minimum(self.credit, np.where(off, CAP_STEPS_AT_ZERO, CAP_STEPS) * self.step_s, out=self.credit)
        if rising < RISING:
            self.repeats_left[:] = REPEATS

    def probe(self, bucket: int, times: StepTimes, rising: float, resume_s: float, longest: int) -> int | None:
        """An exploratory length, at most longest, that the bucket can pay for, charged to it; mostly None."""
        if not self.decided or longest < 1:
            return None
        if self.lengths[bucket] == 0:
            return self._probe_at_zero(bucket, times, rising, resume_s, longest)
        return self._probe_optimist(bucket, times, longest)

    def _probe_optimist(self, bucket: int, times: StepTimes, longest: int) -> int | None:
        """The length that could most plausibly be better than the choice, if its expected loss has been earned."""
        chosen, credit = int(self.lengths[bucket]), float(self.credit[bucket])
        least = LEAST_CHARGE * float(self.step_s[bucket])
        if credit < least:
            return None
        goodput = self.goodput[bucket]
        hope = np.log(goodput / goodput[chosen]) + OPTIMISM * np.sqrt(times.relative_variance(bucket, chosen))
        hope[chosen] = hope[longest + 1 :] = -np.inf
        candidate = int(hope.argmax())
        cost = max(float(self.loss[bucket, candidate]), least)
        if hope[candidate] <= 0.0 or cost > credit:
            return None
        self._charge(bucket, cost)
        return candidate

    def _probe_at_zero(self, bucket: int, times: StepTimes, rising: float, resume_s: float, longest: int) -> int | None:
        """One draft token, to see whether drafting would pay again, and then the length that is thought to cost least.

        In the first of the two steps the draft catches up, so it teaches acceptance alone. Without the second one, times
        that are wrongly believed to be long would keep drafting off for ever. Times that are known need none.
        """
        second = 1 + int(self.loss[bucket, 1 : longest + 1].argmin())
        if self.to_follow[bucket]:
            self.to_follow[bucket] = False
            return second
        least = LEAST_CHARGE * float(self.step_s[bucket])
        cost = max(float(self.loss[bucket, 1]) + resume_s, least)
        if cost > self.credit[bucket]:
            if rising < RISING or self.repeats_left[bucket] <= 0:
                return None
            self.repeats_left[bucket] -= 1
        elif times.relative_variance(bucket, 0)[second] > KNOWN_SD**2:
            # Both are charged now. What that overdraws is earned back before the next.
            self.to_follow[bucket] = True
            cost += max(float(self.loss[bucket, second]), least)
        self._charge(bucket, cost)
        return 1

    def _charge(self, bucket: int, cost: float) -> None:
        self.credit[bucket] -= cost
        self.probe_s += cost
