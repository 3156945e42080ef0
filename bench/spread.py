"""Figures with their spread, from repeats that were run interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of some repeats, with the least and the greatest."""

    median: float
    low: float
    high: float
    repeats: int

    def __str__(self) -> str:
        interval = f" ({figure(self.low)} to {figure(self.high)})" if self.repeats > 1 else ""
        return f"{figure(self.median)}{interval}"


def figure(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError when there are no values."""
    if not values:
        raise ValueError("no repeats to summarise")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of the ratios, repeat by repeat: what slowed the machine down in one repeat slowed both sides."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])
