"""A machine's wandering speed, followed."""

from __future__ import annotations

import math

# Log-sd of the speed: start, and range. Small at the start: what is not known to wander does not excuse errors. Not large in
# the end: a speed that could be anything would hide that the draft alone became slow or quick. A jump may go further.
START_SD, LEAST_SD, MOST_SD, MOST_JUMP = 0.03, 0.01, 0.25, 0.4
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
        self.variance = min(self.variance * kept * kept + (1.0 - kept * kept) * self.sd**2, MOST_JUMP**2)
        if surprise * surprise > JUMP * JUMP * (self.variance + max(uncertainty, doubt)):
            self.variance = min(surprise * surprise, MOST_JUMP**2)
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
        away = abs(self.away)
        if away <= LEAST_AWAY or away <= AWAY_SDS * self.sd * math.sqrt(SPEED_REPORTS / AWAY_REPORTS):
            return 0.0
        return self.away
