"""Has something changed for everybody? Two-sided CUSUM of surprises, kept apart by witness.

One or two witnesses (workers) are believed each by itself. Where there are three or more, a change of the device is one
that several see, in the same direction: a single worker with odd step times never makes all others start anew.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

# Sum of (|z| - slack) at which a lone witness is believed, and at which one of several counts.
ALONE, AMONG_OTHERS = 12.0, 8.0
# Witnesses told apart; further ones share a place.
MOST_WITNESSES = 128
# From three witnesses on a quarter of them must agree, at least 2 and at most so many.
MOST_REQUIRED = 8


class DriftDetector:
    """sums: by witness, evidence that values rose and that they fell, and for how many values each was enough."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, senders: list[str], surprises: list[float], slack: float, lasting: float) -> float:
        """Surprises in standard deviations, in order, and who reported each. Returns the statistic if a change was found.

        slack: how large a surprise has to be to count as evidence. lasting: for how many values the evidence has to be
        enough; what is over by then was a burst, not a change.

        The sign tells whether values rose or fell; 0.0 is no change. What was counted starts anew after a change.
        """
        fired, start = 0.0, 0
        for sender, members in groupby(senders):
            end = start + sum(1 for _ in members)
            fired = self._add_one(sender, surprises[start:end], slack, lasting) or fired
            start = end
        return fired

    def _add_one(self, sender: str, surprises: list[float], slack: float, lasting: float) -> float:
        mine = self.sums.get(sender)
        if mine is None:
            mine = self.sums.setdefault(sender if len(self.sums) < MOST_WITNESSES else "", [0.0, 0.0, 0, 0])
        up, down, lasted_up, lasted_down = mine
        threshold = ALONE if len(self.sums) < 3 else AMONG_OTHERS
        cap = 2.0 * ALONE
        for z in surprises:
            up += z - slack
            down -= z + slack
            up = cap if up > cap else up if up > 0.0 else 0.0
            down = cap if down > cap else down if down > 0.0 else 0.0
            lasted_up = lasted_up + 1 if up > threshold else 0
            lasted_down = lasted_down + 1 if down > threshold else 0
        mine[:] = up, down, lasted_up, lasted_down
        for side in (0, 1):
            if mine[2 + side] > lasting and self._agree(side, lasting):
                self.forget()
                return up if side == 0 else -down
        return 0.0

    def _agree(self, side: int, lasting: float) -> bool:
        """Whether enough witnesses see the change, the one that has just spoken included."""
        if len(self.sums) < 3:
            return True
        required = max(2, min(MOST_REQUIRED, -(-len(self.sums) // 4)))
        return sum(sums[2 + side] > lasting for sums in self.sums.values()) >= required

    def forget(self) -> None:
        """Start counting anew; the witnesses stay known."""
        for sums in self.sums.values():
            sums[:] = 0.0, 0.0, 0, 0

    def resting(self, sender: str, level: float) -> bool:
        """Whether a witness sees no rise worth mentioning."""
        sums = self.sums.get(sender) or self.sums.get("")
        return sums is None or sums[0] < level

    def export_state(self) -> list[Any]:
        """JSON-able values from which to go on."""
        return [[sender, *sums] for sender, sums in self.sums.items()]

    def restore(self, state: list[Any]) -> None:
        """Go on from an exported state."""
        self.sums = {sender: [float(value) for value in sums] for sender, *sums in state}
