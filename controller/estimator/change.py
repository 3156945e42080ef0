"""What changes: jumps, found by sums of surprises, and a machine's wandering speed, followed."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        self.sums: dict[str, list[float]] = {}  # by witness: rose, fell, reports for which each has been high

    @property
    def rising(self) -> float:
        """How far the sum that looks for a rise has come, of the witness that saw most."""
        return max((sums[0] for sums in self.sums.values()), default=0.0)

    def add(self, witness: str, surprises: Sequence[float], slack: float = 0.0, lasting: float = 0.0) -> float:
        """Surprises of a witness in standard deviations, in order.

        slack: added to the usual one; lasting: for how many reports the evidence must be enough. Returns the statistic,
        positive for a rise, when a change is found, and starts anew; else 0.
        """
        mine = self.sums.get(witness)
        if mine is None:
            mine = self.sums.setdefault(witness if len(self.sums) < MOST_WITNESSES else "", [0.0, 0.0, 0.0, 0.0])
        slack += self.slack
        threshold, most = self.threshold * (1.0 if len(self.sums) < 3 else AMONG_OTHERS), 2.0 * self.threshold
        up, down, high, low = mine
        for z in surprises:  # comparisons, since this is done for every report
            up += z - slack
            down -= z + slack
            up = 0.0 if up < 0.0 else most if up > most else up
            down = 0.0 if down < 0.0 else most if down > most else down
            high = high + 1.0 if up > threshold else 0.0
            low = low + 1.0 if down > threshold else 0.0
        mine[:] = up, down, high, low
        for side in (2, 3):
            if mine[side] > lasting and self._agree(side, lasting):
                self.forget()
                return up if side == 2 else -down
        return 0.0

    def _agree(self, side: int, lasting: float) -> bool:
        if len(self.sums) < 3:
            return True
        required = max(2, min(MOST_REQUIRED, -(-len(self.sums) // 4)))
        return sum(sums[side] > lasting for sums in self.sums.values()) >= required

    def forget(self) -> None:
        """Start counting anew; the witnesses stay known."""
        for sums in self.sums.values():
            sums[:] = 0.0, 0.0, 0.0, 0.0


# Log-sd of the speed: start, and range. Small at the start: what is not known to wander does not excuse errors.
START_SD, LEAST_SD, MOST_SD = 0.03, 0.01, 0.4
# Share of variance that is wandering speed at the start: as on a shared machine, since where the surface itself is still
# unsure nothing is lost by looking twice at a change.
START_SHARE = 0.8
# Relative change of the sd per group and unit of agreement between neighbouring groups' surprises.
RATE = 0.15
# A surprise of so many standard deviations is a jump of the speed: followed at once, and this part of its square is added
# to the variance of how far the speed goes.
JUMP, JUMP_SHARE = 3.0, 0.2
# Reports after which the speed has returned to the usual one, and over which the share of wandering is averaged.
SPEED_REPORTS, SHARE_REPORTS = 50.0, 200.0
# A speed that stays away is none: its mean over so many reports is compared with so many of its standard deviations, and
# this at least.
AWAY_REPORTS, AWAY_SDS, LEAST_AWAY = 300.0, 2.0, 0.15


class Speed:
    """How much longer than usual all steps of a worker take at the moment, in log time: a reverting walk, filtered.

    It has no say in the choice, but without a name for it a slow second in which only long lengths were played would make
    short ones look better. How far it goes is learned from whether surprises of neighbouring groups agree (followed too
    slowly) or alternate (too eagerly); what the model does not know yet counts as surprise of the model, not of the speed.
    """

    STATE = ("sd", "mean", "variance", "share", "last", "away", "usual_length")

    def __init__(self) -> None:
        self.sd, self.mean, self.variance = START_SD, 0.0, START_SD * START_SD
        self.share, self.last = START_SHARE, 0.0
        self.away = 0.0  # the mean, averaged
        self.usual_length = 0.0  # that the worker plays, averaged

    def learn(self, surprise: float, uncertainty: float, noise: float, num_reports: int) -> None:
        """surprise: mean log time of a group over its prediction, speed included; variances of model and of one report."""
        uncertainty += noise / num_reports
        kept = math.exp(-num_reports / SPEED_REPORTS)
        self.mean *= kept
        self.variance = min(self.variance * kept * kept + (1.0 - kept * kept) * self.sd**2, MOST_SD**2)
        if surprise * surprise > JUMP * JUMP * (self.variance + uncertainty):
            self.variance = min(surprise * surprise, MOST_SD**2)
            self.sd = min(math.sqrt(self.sd**2 + JUMP_SHARE * surprise * surprise), MOST_SD)
        total = self.variance + uncertainty
        z = surprise / math.sqrt(total)
        agreement = min(max(z * self.last, -1.0), 1.0)
        self.sd = min(max(self.sd * math.exp(RATE * agreement), LEAST_SD), MOST_SD)
        self.last = z
        self.mean += self.variance / math.sqrt(total) * z
        self.variance *= uncertainty / total
        now = self.sd**2 / (self.sd**2 + noise)
        self.share += min(1.0, num_reports / SHARE_REPORTS) * (now - self.share)
        self.away += min(1.0, num_reports / AWAY_REPORTS) * (self.mean - self.away)

    @property
    def stays_away(self) -> bool:
        """Whether it is not a moment's speed any more, but an error of what is believed."""
        return abs(self.away) > max(LEAST_AWAY, AWAY_SDS * self.sd * math.sqrt(SPEED_REPORTS / AWAY_REPORTS))
