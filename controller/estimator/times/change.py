"""What changes, found by sums of surprises, when the speeds of the workers were taken out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from statistics import median
from typing import Any

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.heard import Heard
from speclen.controller.estimator.state import restored
from speclen.controller.estimator.times.speed import LEAST_AWAY, Speed
from speclen.controller.estimator.times.steps import ByStep, Spans, by_step, summed

# A report surprises by at most so many standard deviations: a step of twenty times its time is a slightly slow one.
LARGEST_Z = 2.5
# Where three or more witnesses report, a quarter of them (at least 2, at most 8) must agree; each needs this part of the
# evidence that a lone one needs.
MOST_REQUIRED, AMONG_OTHERS = 8, 0.7
MOST_WITNESSES = 128


class Change:
    """Has something changed for everybody? Two-sided sums of (|z| - slack), kept apart by witness.

    Kept apart, so that a single odd worker changes nothing for the others.
    """

    STATE = ("sums",)

    def __init__(self, slack: float, threshold: float) -> None:
        self.slack, self.threshold = slack, threshold
        self.sums: dict[str, list[float]] = {}  # by witness: rose, fell

    def add(self, witness: str, surprises: Sequence[float], weights: Iterable[float] = repeat(1.0)) -> float:
        """Surprises of a witness in standard deviations, in order. weights: less than 1 for those that come of one error.

        Returns the sum, positive for a rise, when a change is found, and starts anew; else 0.
        """
        mine = self.sums.get(witness)
        if mine is None:
            mine = self.sums.setdefault(witness if len(self.sums) < MOST_WITNESSES else "", [0.0, 0.0])
        slack, (up, down) = self.slack, mine
        threshold = self.threshold * (1.0 if len(self.sums) < 3 else AMONG_OTHERS)
        for z, weight in zip(surprises, weights, strict=False):  # comparisons, since this is done for every report
            up += weight * (z - slack)
            down -= weight * (z + slack)
            up = 0.0 if up < 0.0 else up
            down = 0.0 if down < 0.0 else down
        mine[:] = min(up, 2.0 * threshold), min(down, 2.0 * threshold)
        for side in (0, 1):
            if mine[side] > threshold and self._agree(side, threshold):
                found = mine[side] if side == 0 else -mine[side]
                self.forget()
                return found
        return 0.0

    def _agree(self, side: int, threshold: float) -> bool:
        if len(self.sums) < 3:
            return True
        required = max(2, min(MOST_REQUIRED, -(-len(self.sums) // 4)))
        return sum(sums[side] > threshold for sums in self.sums.values()) >= required

    def drop(self, gone: Iterable[str]) -> None:
        """Witnesses that have gone have no vote, for or against."""
        _drop(self.sums, gone)

    def forget(self) -> None:
        """Start counting anew; the witnesses stay known."""
        for sums in self.sums.values():
            sums[:] = 0.0, 0.0


def _drop(known: dict[str, Any], gone: Iterable[str]) -> None:
    """Take workers out. Those that shared a place, for want of another, may then have their own."""
    for worker in gone:
        known.pop(worker, None)
    if len(known) < MOST_WITNESSES:
        known.pop("", None)


# A change of longer lengths against shorter ones: slack and sum of surprises, in standard deviations. Reports over which
# the usual length of a worker is averaged.
TILT_SLACK, TILT_THRESHOLD, LENGTH_REPORTS = 0.5, 10.0, 50.0
# Tokens that a worker's rows hold: reports of its own over which they are averaged, relative change after which they are
# others than before, and what is added to them where they are compared.
HELD_REPORTS, CONTEXT_LEFT, SHORT_CONTEXT = 50.0, 0.5, 256.0
# Where several workers tell: factor by which a report may lie beyond the median of them, and tokens added to that.
FAR_CONTEXT, FAR_TOKENS = 2.0, 1024.0


def left_behind(now: float, before: float) -> bool:
    """Whether contexts are half as long again, or half as long, as before."""
    return abs(now - before) > CONTEXT_LEFT * (before + SHORT_CONTEXT)


class Watch:
    """Over the step times of a group of workers: their speeds, and whether something has changed for all of them."""

    STATE = ("speeds", "tilt", "heard", "contexts")

    def __init__(self) -> None:
        self.heard = Heard()
        self.speeds: dict[str, Speed] = {}  # by worker, since machines are shared and throttle each for itself
        self.tilt = Change(TILT_SLACK, TILT_THRESHOLD)
        # Tokens that a row holds, by worker: lately, and when the evidence began.
        self.contexts: dict[str, list[float]] = {}

    def speed_of(self, worker: str) -> Speed:
        """Of a worker; in a very large fleet the last ones share theirs."""
        known = self.speeds.get(worker)
        if known is None:
            known = self.speeds.setdefault(worker if len(self.speeds) < MOST_WITNESSES else "", Speed())
        return known

    def now(self, spans: Spans) -> tuple[ByStep, ByStep]:
        """Speed of each step's worker, and its variance."""
        speeds = [self.speed_of(worker) for worker, _ in spans]
        return by_step(spans, [each.mean for each in speeds]), by_step(spans, [each.variance for each in speeds])

    def follow(
        self,
        spans: Spans,
        surprise: FloatArray,
        unsure: FloatArray,
        unseen: FloatArray,
        noise: float,
        count: FloatArray,
    ) -> tuple[ByStep, ByStep]:
        """Follow the speeds. surprise: over the prediction, speed included; count: steps of each report.

        noise: variance of a report; unsure: of what the model says of it, times the reports that share that error. unseen:
        the same on top, where a jump is looked for: what is played for the first time would pass for one.
        Returns speeds and what each report counts for: what a speed may have wrong all reports of its worker have wrong
        together.
        """
        if gone := self.heard.note(worker for worker, _ in spans):
            self.tilt.drop(gone)
            _drop(self.speeds, gone)
            _drop(self.contexts, gone)
        doubt = noise + unsure
        precision = count / doubt
        sums = summed(spans, [precision * surprise, precision, count / (doubt + unseen), count])
        speeds, shares = [], []
        for (worker, _), surprised, known, seen, size in zip(spans, *sums, strict=True):
            speed = self.speed_of(worker)
            speed.learn(surprised / known, 1.0 / known, size, 1.0 / seen)
            speeds.append(speed.mean)
            shares.append(noise / (noise + size * speed.variance))
        return by_step(spans, speeds), by_step(spans, shares)

    def changed(self, spans: Spans, lengths: np.ndarray, z: FloatArray, weight: FloatArray) -> float:
        """Statistic of a change, or 0: speeds that stay away, or longer lengths against the usual one.

        The latter the speed of the moment would hide. z: surprises beyond the speed, in standard deviations; weight: less
        where several come of one error of the model.
        """
        found, side = 0.0, self._sides(spans, lengths)
        told = side.nonzero()[0]
        if len(told):
            side = side[told]
            surprises = (np.minimum(np.maximum(z[told], -LARGEST_Z), LARGEST_Z) * side).tolist()
            weights, ends = weight[told].tolist(), told.searchsorted([span.stop for _, span in spans]).tolist()
            start = 0
            for (worker, _), end in zip(spans, ends, strict=True):
                if end > start:
                    found = self.tilt.add(worker, surprises[start:end], weights[start:end]) or found
                start = end
        return found or self.away()

    def away(self) -> float:
        """Statistic of speeds that stay away, of more than half of the workers, or 0."""
        away = [speed.stays_away for speed in self.speeds.values()]
        if not away or 2 * away.count(0.0) > len(away):
            return 0.0
        return sorted(away, key=abs)[(len(away) - 1) // 2] / LEAST_AWAY

    def _sides(self, spans: Spans, lengths: np.ndarray) -> np.ndarray:
        """Of each step: 1 where it is longer than its worker's usual one, which is followed, -1 where shorter, else 0."""
        return np.sign(lengths - by_step(spans, self.follow_lengths(spans, lengths)))

    def follow_lengths(self, spans: Spans, lengths: np.ndarray) -> list[int]:
        """Follow what each worker usually plays, which is returned, as it was before these steps."""
        usual = []
        for (worker, span), total in zip(spans, summed(spans, [lengths])[0], strict=True):
            speed, size = self.speed_of(worker), span.stop - span.start
            mean = total / size
            speed.usual_length = mean if speed.usual_length < 0.0 else speed.usual_length
            usual.append(round(speed.usual_length))
            speed.usual_length += (mean - speed.usual_length) * min(1.0, size / LENGTH_REPORTS)
        return usual

    def follow_contexts(self, spans: Spans, context: FloatArray, count: FloatArray) -> tuple[float, float]:
        """Follow how many tokens each worker's rows hold; returns the least and the most that a report is believed to.

        Of one worker everything is. Of two nobody knows which is right: the smaller one counts, which cannot be any number.
        """
        for (worker, _), tokens, steps in zip(spans, *summed(spans, [context * count, count]), strict=True):
            if tokens > 0.0:
                mean, name = tokens / steps, worker
                if worker not in self.contexts and len(self.contexts) >= MOST_WITNESSES:
                    name = ""
                known = self.contexts.setdefault(name, [mean, mean])
                known[0] -= math.expm1(-steps / HELD_REPORTS) * (mean - known[0])
        lately = [mean for mean, _ in self.contexts.values()]
        if len(lately) < 2:
            return 0.0, math.inf
        usual = median(lately) if len(lately) > 2 else min(lately)
        return usual / FAR_CONTEXT - FAR_TOKENS, FAR_CONTEXT * (usual + FAR_TOKENS)

    def contexts_left(self) -> bool:
        """Whether contexts of more than half of the workers are others than when the evidence began."""
        return 2 * sum(left_behind(*known) for known in self.contexts.values()) > len(self.contexts)

    def contexts_begin(self) -> None:
        """Evidence begins with the contexts of now."""
        for known in self.contexts.values():
            known[1] = known[0]

    def settle(self) -> float:
        """After a change: the present speed, which is returned, becomes the usual one."""
        usual = median(speed.mean for speed in self.speeds.values())
        for speed in self.speeds.values():
            speed.mean, speed.away = speed.mean - usual, 0.0
        return usual

    def renew(self) -> None:
        """Speeds after a state was restored."""
        self.speeds = {worker: restored(Speed(), state) for worker, state in self.speeds.items()}
