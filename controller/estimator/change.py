"""What changes: jumps, found by sums of surprises, and a machine's wandering speed, followed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from statistics import median

import numpy as np

from speclen.controller.estimator.arrays import FloatArray
from speclen.controller.estimator.state import restored

Spans = Sequence[tuple[str, slice]]  # each worker of a group and its place in it

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

    def forget(self) -> None:
        """Start counting anew; the witnesses stay known."""
        for sums in self.sums.values():
            sums[:] = 0.0, 0.0


# Log-sd of the speed: start, and range. Small at the start: what is not known to wander does not excuse errors.
START_SD, LEAST_SD, MOST_SD = 0.03, 0.01, 0.4
# Relative change of the sd per group and unit of agreement between neighbouring groups' surprises.
RATE = 0.15
# A surprise of so many standard deviations is a jump of the speed: followed at once, and this part of its square is added
# to the variance of how far the speed goes.
JUMP, JUMP_SHARE = 3.0, 0.2
# Reports after which the speed has returned to the usual one.
SPEED_REPORTS = 50.0
# A speed that stays away is none: its mean over so many reports is compared with so many of its standard deviations, and
# this at least.
AWAY_REPORTS, AWAY_SDS, LEAST_AWAY = 300.0, 1.7, 0.15


class Speed:
    """How much longer than usual all steps of a worker take at the moment, in log time: a reverting walk, filtered.

    It has no say in the choice, but without a name for it a slow second in which only long lengths were played would make
    short ones look better. How far it goes is learned from whether surprises of neighbouring groups agree (followed too
    slowly) or alternate (too eagerly); what the model does not know yet counts as surprise of the model, not of the speed.
    """

    STATE = ("sd", "mean", "variance", "last", "away", "usual_length")

    def __init__(self) -> None:
        self.sd, self.mean, self.variance, self.last = START_SD, 0.0, START_SD * START_SD, 0.0
        self.away = 0.0  # the mean, averaged
        self.usual_length = -1.0  # that the worker plays, averaged; below 0 before the first

    def learn(self, surprise: float, uncertainty: float, num_reports: int, doubt: float = 0.0) -> None:
        """surprise: mean log time of a group over its prediction, speed included.

        uncertainty: variance of the rest; doubt: at most, where it is to be a jump of the speed.
        """
        kept = math.exp(-num_reports / SPEED_REPORTS)
        self.mean *= kept
        self.variance = min(self.variance * kept * kept + (1.0 - kept * kept) * self.sd**2, MOST_SD**2)
        if surprise * surprise > JUMP * JUMP * (self.variance + max(uncertainty, doubt)):
            self.variance = min(surprise * surprise, MOST_SD**2)
            self.sd = min(math.sqrt(self.sd**2 + JUMP_SHARE * surprise * surprise), MOST_SD)
        total = self.variance + uncertainty
        z = surprise / math.sqrt(total)
        agreement = min(max(z * self.last, -1.0), 1.0)
        self.sd = min(max(self.sd * math.exp(RATE * agreement), LEAST_SD), MOST_SD)
        self.last = z
        self.mean += self.variance / math.sqrt(total) * z
        self.variance *= uncertainty / total
        self.away += min(1.0, num_reports / AWAY_REPORTS) * (self.mean - self.away)

    @property
    def stays_away(self) -> float:
        """How far, where it is not a moment's speed any more, but an error of what is believed; else 0."""
        least = max(LEAST_AWAY, AWAY_SDS * self.sd * math.sqrt(SPEED_REPORTS / AWAY_REPORTS))
        return self.away if abs(self.away) > least else 0.0


# A change of longer lengths against shorter ones: slack and sum of surprises, in standard deviations. Reports over which
# the usual length of a worker is averaged.
TILT_SLACK, TILT_THRESHOLD, LENGTH_REPORTS = 0.5, 10.0, 50.0


class Watch:
    """Over the step times of a group of workers: their speeds, and whether something has changed for all of them."""

    STATE = ("speeds", "tilt")

    def __init__(self) -> None:
        self.speeds: dict[str, Speed] = {}  # by worker, since machines are shared and throttle each for itself
        self.tilt = Change(TILT_SLACK, TILT_THRESHOLD)

    def speed_of(self, worker: str) -> Speed:
        """Of a worker; in a very large fleet the last ones share theirs."""
        known = self.speeds.get(worker)
        if known is None:
            known = self.speeds.setdefault(worker if len(self.speeds) < MOST_WITNESSES else "", Speed())
        return known

    def now(self, spans: Spans) -> tuple[FloatArray, FloatArray]:
        """Speed of each step's worker, and its variance, both [n]."""
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
    ) -> tuple[FloatArray, FloatArray]:
        """Follow the speeds. surprise: over the prediction, speed included; count: steps of each report.

        noise: variance of a report; unsure: of what the model says of it, times the reports that share that error. unseen:
        the same on top, where a jump is looked for: what is played for the first time would pass for one.
        Returns speeds and what each report counts for, both [n]: what a speed may have wrong all reports of its worker have
        wrong together.
        """
        starts, precision = [span.start for _, span in spans], count / (noise + unsure)
        told = np.stack([precision * surprise, precision, count / (noise + unsure + unseen), count])
        sums = np.add.reduceat(told, starts, axis=1).tolist()
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
        found, widths = 0.0, np.minimum(np.maximum(z, -LARGEST_Z), LARGEST_Z)
        for worker, span in spans:
            speed, mine = self.speed_of(worker), lengths[span]
            mean = float(mine.sum()) / len(mine)
            speed.usual_length = mean if speed.usual_length < 0.0 else speed.usual_length
            side = np.sign(mine - round(speed.usual_length))
            speed.usual_length += (mean - speed.usual_length) * min(1.0, len(mine) / LENGTH_REPORTS)
            if side.any():
                told = side != 0
                surprises, weights = (widths[span] * side)[told].tolist(), weight[span][told].tolist()
                found = self.tilt.add(worker, surprises, weights) or found
        away = sorted((speed.stays_away for speed in self.speeds.values()), key=abs)
        return found or away[(len(away) - 1) // 2] / LEAST_AWAY  # more than half of the workers must stay away

    def settle(self) -> float:
        """After a change: the present speed, which is returned, becomes the usual one."""
        usual = median(speed.mean for speed in self.speeds.values())
        for speed in self.speeds.values():
            speed.mean, speed.away = speed.mean - usual, 0.0
        return usual

    def renew(self) -> None:
        """Speeds after a state was restored."""
        self.speeds = {worker: restored(Speed(), state) for worker, state in self.speeds.items()}


def by_step(spans: Spans, values: Sequence[float]) -> FloatArray:
    """A worker's value for each of its steps, [n]."""
    if len(spans) == 1:  # the usual case, and three times as quick
        return np.full(spans[0][1].stop, values[0])
    steps: FloatArray = np.repeat(values, [span.stop - span.start for _, span in spans])
    return steps
