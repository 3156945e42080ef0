"""How far a device's speed wanders around the usual one, and how much that excuses.

A neighbour on the same core, a warm chip: for a while all steps take longer, and then no more. How far that goes is
learned from whether surprises of neighbouring groups agree. What goes no further, or is soon over, is not drift.
"""

from __future__ import annotations

import math

# Log-sd of the speed: start, and the range it is tracked in.
START_SD, LEAST_SD, MOST_SD = 0.05, 0.01, 0.4
# Share of wandering at the start: that of a shared machine. Where the device turns out to be steady little is lost, while a
# neighbour's first visit that passes for drift would unsettle everything.
START_SHARE = 0.8
# Relative change of the sd per group and unit of agreement between neighbouring groups.
RATE = 0.12
# Reports after which the speed has returned to the usual one.
MEMORY_REPORTS = 50.0
# Reports over which the share of wandering is averaged, so that a change does not pass for wandering at once.
SHARE_REPORTS = 300.0
# What the drift detector takes for granted, in standard deviations: on a steady device, and added where all is
# wandering, whose surprises come in rows. There a change also has to last for so many reports.
SLACK, SLACK_OF_WANDERING, LASTING_REPORTS = 0.5, 1.0, 100.0


class Wandering:
    """sd: of the log speed. share: of a step's variance that is wandering, averaged."""

    def __init__(self) -> None:
        self.sd = START_SD
        self.share = START_SHARE
        self.last_surprise = 0.0

    def learn(self, surprise: float) -> None:
        """surprise: what the steps of a group have in common, in standard deviations.

        Surprises of neighbouring groups are uncorrelated if the speed is followed as fast as it changes: if they agree
        it was followed too slowly, if they alternate too eagerly.
        """
        agreement = min(max(surprise * self.last_surprise, -1.0), 1.0)
        self.sd = min(max(self.sd * math.exp(RATE * agreement), LEAST_SD), MOST_SD)
        self.last_surprise = surprise

    def excuse(self, num_reports: int, noise: float) -> tuple[float, float]:
        """Slack and lasting for the drift detector (see there), at so many reports with this variance of noise."""
        now = self.sd**2 / (self.sd**2 + noise)
        self.share += min(1.0, num_reports / SHARE_REPORTS) * (now - self.share)
        return SLACK + SLACK_OF_WANDERING * self.share, LASTING_REPORTS * self.share

    def export_state(self) -> list[float]:
        """JSON-able values from which to go on."""
        return [self.sd, self.share, self.last_surprise]

    def restore(self, state: list[float]) -> None:
        """Go on from an exported state."""
        self.sd, self.share, self.last_surprise = (float(value) for value in state)
