"""Counts since the start of the process, for the metrics page."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# Bounds of the histogram of how long reports wait to be learned from, in seconds.
WAITS_S = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class Totals:
    """num_reports: learned from, in num_groups calls. refused: by reason. drift: by factor.

    waits: groups by the bounds of WAITS_S, then those beyond; waited_s: their sum.
    """

    num_reports: int = 0
    num_groups: int = 0
    num_repeated: int = 0
    num_missing: int = 0
    num_decisions: int = 0
    num_probes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAITS_S) + 1))
    waited_s: float = 0.0

    def add_group(self, num_reports: int, waited_s: float) -> None:
        self.num_groups += 1
        self.num_reports += num_reports
        self.waits[bisect_left(WAITS_S, waited_s)] += 1
        self.waited_s += max(waited_s, 0.0)
