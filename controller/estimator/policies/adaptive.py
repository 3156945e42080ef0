"""The policy of speclen: the best of what is believed, and rare exploratory steps paid from a stated budget.

In every bucket the length with the most expected tokens per expected second is chosen; a challenger must win by a small
margin, and for long enough that waiting has cost a given part of a step, so that near-ties do not flap. Acceptance and
latency learn about all lengths from any of them, so exploring is rarely needed, and never free: each bucket earns a
small share of the time it spends, and a probe is handed out only when its expected loss has been earned before. So the
expected time spent on exploring is at most that share of all time, plus a few steps per bucket. Length 0 shows nothing
of acceptance, so there the share is larger and starts filled; and since the draft has to catch up in the first step
after it, whose time therefore says nothing, a second step follows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.context import ContextModel
from speclen.controller.estimator.core import Profile, StepObservation


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """Every knob of the choice."""

    # Relative gain in goodput that a change of length must promise: against flapping between near-ties.
    margin: float = 0.002
    # What a change must have promised to save before it is made, in steps: a large gain is taken at once, a small one when
    # it lasts. Estimates of near-ties overtake each other within a hundred steps.
    patience: float = 0.1
    # A length whose step time, relative to the present one's, is known to no better than this (log-sd) must promise more
    # by so many times the rest: a step to where little is known may be a step off a cliff.
    trusted_sd: float = 0.1
    caution: float = 0.5
    # Steps of a bucket over which leaving length 0 must pay for the draft's catching up.
    resume_horizon: float = 100.0
    # Share of a bucket's time that probes may cost where drafting is on, and where it is off.
    share: float = 0.002
    share_at_zero: float = 0.003
    # Most that can be saved up, in steps of the bucket, where drafting is on, and where it is off (filled at the start).
    cap_steps: float = 1.0
    cap_steps_at_zero: float = 4.0
    # Saved up at a start without a profile of this very context where drafting is on, in steps of the bucket.
    start_steps: float = 1.0
    # Standard deviations of optimism with which a probe's gain is judged.
    optimism: float = 1.5
    # Least that a probe is charged, in steps: estimates that say "free" are estimates.
    least_charge: float = 0.02
    # Steps of plain decoding that are seen in a bucket without a profile; a large surprise is believed in parts.
    least_plain_steps: int = 3
    # A probe at length 0 takes a second step unless the step time is known this well (log-sd, relative to length 0).
    known_sd: float = 0.06
    # Acceptance rising this far in the detector at length 0 lets probes follow at once, at most so many.
    rising: float = 1.0
    repeats: int = 12
    # Length before anything is known.
    cold_length: int = 2


class AdaptivePolicy:
    """Chooses by a context's estimates."""

    def __init__(self, model: ContextModel, config: AdaptiveConfig | None = None) -> None:
        self.model = model
        self.config = config or AdaptiveConfig()
        self.choice = np.full(len(model.buckets), self._cold_length(), dtype=np.int64)
        self.promised = np.zeros(
            len(model.buckets)
        )  # steps that changing would have saved since it first seemed better
        self.decided = False  # whether choices rest on estimates
        self.credit = np.zeros(len(model.buckets))  # seconds of expected loss that probes may still cost
        self.filled = np.zeros(len(model.buckets), dtype=bool)  # whether length 0 got its starting credit
        self.started = False  # whether buckets got their starting credit
        self.repeats_left = np.zeros(len(model.buckets), dtype=np.int64)
        self.to_follow = np.zeros(len(model.buckets), dtype=bool)  # whether a probe at length 0 awaits its second step
        self.probe_seconds = 0.0  # expected loss of all probes so far
        self.decide()

    def _cold_length(self) -> int:
        return min(self.config.cold_length, self.model.limits.max_speculation_length)

    def extend(self) -> None:
        """Follow the model to more buckets."""
        more = len(self.model.buckets) - len(self.choice)
        self.choice = np.append(self.choice, np.full(more, self._cold_length()))
        self.promised = np.append(self.promised, np.zeros(more))
        self.credit = np.append(self.credit, np.zeros(more))
        self.filled = np.append(self.filled, np.zeros(more, dtype=bool))
        self.repeats_left = np.append(self.repeats_left, np.zeros(more, dtype=np.int64))
        self.to_follow = np.append(self.to_follow, np.zeros(more, dtype=bool))
        self.decide()

    def pull(self, bucket: int) -> int:
        """The length believed best."""
        return int(self.choice[bucket])

    def pull_all(self) -> list[int]:
        """The lengths believed best."""
        lengths: list[int] = self.choice.tolist()
        return lengths

    def update(self, buckets: np.ndarray, observations: Sequence[StepObservation]) -> None:
        """Earn credit for a group of steps that the model has learned from, and decide anew."""
        self.decide(len(observations))
        if not self.decided:
            return
        config = self.config
        visits = np.bincount(buckets, minlength=len(self.choice))
        step = self.seconds_chosen
        off = self.choice == 0
        cap = np.where(off, config.cap_steps_at_zero, config.cap_steps) * step
        earned = visits * np.where(off, config.share_at_zero, config.share) * step
        self.credit = np.minimum(self.credit + earned, np.maximum(cap, 0.0))
        fresh = off & ~self.filled
        if fresh.any():
            self.credit[fresh] = cap[fresh]
            self.filled |= fresh
        if not self.started:
            if not self.model.latency.profiled_here.any():
                self.credit[~off] += config.start_steps * step[~off]
            self.started = True
        if self.model.acceptance.cusum_up < config.rising:
            self.repeats_left[:] = config.repeats

    def seed(self, profile: Profile) -> None:
        """Decide by what the model has taken from the profile."""
        self.decide()

    def decide(self, num_steps: int | None = None) -> None:
        """Choose by the newest estimates: the best, and the present one unless it is beaten by the margin for long enough.

        num_steps: of the context since the last time, all buckets together; None: what is better is chosen at once.
        """
        if not self.model.latency.known:
            return
        rows = np.arange(len(self.choice))
        goodput = self.model.tokens / self.model.seconds
        best = goodput.argmax(axis=1)
        if self.decided:
            now, then = goodput[rows, best], goodput[rows, self.choice]
            needed = self.config.margin + np.where(
                (self.choice == 0) & (best > 0),
                self.model.resume_s / (self.config.resume_horizon * self.model.seconds[:, 0]),
                0.0,
            )
            best = np.where(now > then * (1.0 + needed), best, self.choice)
            for bucket in np.flatnonzero(best != self.choice).tolist():
                best[bucket] = self._cautious(bucket, goodput[bucket], int(self.choice[bucket]), float(needed[bucket]))
            if num_steps is not None:
                gain = goodput[rows, best] / goodput[rows, self.choice] - 1.0
                self.promised = np.where(best != self.choice, self.promised + num_steps * gain, 0.0)
                best = np.where(self.promised >= self.config.patience, best, self.choice)
            self.promised[best != self.choice] = 0.0
        self.choice, self.decided = best, True
        self._assess()

    def _cautious(self, bucket: int, goodput: FloatArray, present: int, needed: float) -> int:
        """The best length of a bucket when what is hardly known counts for less, the present one unless it is beaten."""
        variance = self.model.latency.log_variance(bucket, against=present)
        doubt = self.config.caution * np.maximum(np.sqrt(variance) - self.config.trusted_sd, 0.0)
        certain = goodput * np.exp(-doubt)
        best = int(certain.argmax())
        return best if certain[best] > goodput[present] * (1.0 + needed) else present

    def _assess(self) -> None:
        """What the choices cost, and what departing from them would."""
        rows = np.arange(len(self.choice))
        self.goodput: FloatArray = self.model.tokens / self.model.seconds
        self.seconds_chosen: FloatArray = self.model.seconds[rows, self.choice]
        # Expected loss, in seconds, of playing a length once instead of the choice.
        self.loss: FloatArray = self.model.seconds * (1.0 - self.goodput / self.goodput[rows, self.choice][:, None])

    def probe(self, bucket: int, max_length: int | None = None) -> int | None:
        """An exploratory length, at most max_length, that the bucket can pay for, charged to it; mostly None."""
        if not self.decided:
            return None
        longest = self.loss.shape[1] - 1
        if max_length is not None:
            longest = min(longest, max_length)
        if longest < 1:
            return None
        if self.choice[bucket] == 0:
            return self._probe_at_zero(bucket, longest)
        return self._probe_optimist(bucket, longest)

    def _probe_optimist(self, bucket: int, longest: int) -> int | None:
        """The length that could most plausibly be better than the choice, if its expected loss has been earned."""
        credit, chosen = float(self.credit[bucket]), int(self.choice[bucket])
        least = self.config.least_charge * float(self.seconds_chosen[bucket])
        if credit < least:
            return None
        goodput = self.goodput[bucket]
        spread = np.sqrt(self.model.latency.log_variance(bucket, against=chosen))
        hope = np.log(goodput / goodput[chosen]) + self.config.optimism * spread
        hope[chosen] = hope[longest + 1 :] = -np.inf
        candidate = int(hope.argmax())
        if hope[candidate] <= 0.0:
            # Plain decoding lies at the edge of what is measured, often before a cliff: it is timed a few times at least.
            latency = self.model.latency
            if latency.num_steps[bucket, 0] >= self.config.least_plain_steps or latency.profiled_here[bucket, 0]:
                return None
            candidate = 0
        cost = max(float(self.loss[bucket, candidate]), least)
        if cost > credit:
            return None
        self._charge(bucket, cost)
        return candidate

    def _probe_at_zero(self, bucket: int, longest: int) -> int | None:
        """One draft token, to see whether drafting would pay again, and then the length that is thought to cost least.

        In the first of the two steps the draft catches up, so it teaches acceptance alone. Without the second one, times
        that are wrongly believed to be long would keep drafting off for ever. Times that are known need none.
        """
        second = 1 + int(self.loss[bucket, 1 : longest + 1].argmin())
        if self.to_follow[bucket]:
            self.to_follow[bucket] = False
            return second
        credit = float(self.credit[bucket])
        least = self.config.least_charge * float(self.seconds_chosen[bucket])
        cost = max(float(self.loss[bucket, 1]) + self.model.resume_s, least)
        rising = self.model.acceptance.cusum_up >= self.config.rising and self.repeats_left[bucket] > 0
        if cost > credit and not rising:
            return None
        if cost > credit:
            self.repeats_left[bucket] -= 1
        elif self.model.latency.log_variance(bucket, against=0)[second] > self.config.known_sd**2:
            # Both are charged now. What that overdraws is earned back before the next.
            self.to_follow[bucket] = True
            cost += max(float(self.loss[bucket, second]), least)
        self._charge(bucket, cost)
        return 1

    def _charge(self, bucket: int, cost: float) -> None:
        self.credit[bucket] -= cost
        self.probe_seconds += cost

    def export_state(self) -> dict[str, Any]:
        """JSON-able values from which to go on."""
        return {
            "choice": self.choice.tolist(),
            "decided": self.decided,
            "promised": self.promised.tolist(),
            "credit": self.credit.tolist(),
            "filled": self.filled.tolist(),
            "started": self.started,
            "repeats_left": self.repeats_left.tolist(),
            "to_follow": self.to_follow.tolist(),
            "probe_seconds": self.probe_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from an exported state, after the model has been restored."""
        self.decided = bool(state["decided"])
        self.choice = np.array(state["choice"], dtype=np.int64)
        self.promised = np.array(state["promised"], dtype=float)
        self.credit = np.array(state["credit"], dtype=float)
        self.filled = np.array(state["filled"], dtype=bool)
        self.started = bool(state["started"])
        self.repeats_left = np.array(state["repeats_left"], dtype=np.int64)
        self.to_follow = np.array(state.get("to_follow", [False] * len(self.choice)), dtype=bool)
        self.probe_seconds = float(state["probe_seconds"])
        if self.decided:
            self._assess()
