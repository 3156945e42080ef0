"""Counts since the start of the process, for the metrics page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """num_reports: learned from, in num_groups calls. refused: by reason. drift: by factor."""

    num_reports: int = 0
    num_groups: int = 0
    num_repeated: int = 0
    num_missing: int = 0
    num_decisions: int = 0
    num_probes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
