"""Figures with their spread, from repeats that were run interleaved; and tables of tokens per second.

As a program: python -m speclen.bench.figures RESULT.json... prints tokens per second by policy and number of requests.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    """Median and range of the values. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no repeats to summarise")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Spread of the ratios of each repeat: a slowdown of the machine in one repeat affects both sides."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


Rates = Mapping[str, Mapping[str, float]]  # by policy, by requests at once


def as_table(name: str, rates: Rates) -> str:
    """Tokens per second by number of requests, with the ratio to the best policy other than `adaptive` in brackets."""
    sizes = sorted({int(size) for row in rates.values() for size in row})
    width = max(map(len, (*rates, name))) + 12
    lines = [f"{name}, tokens/s".ljust(width) + "".join(f"{size} at once".rjust(16) for size in sizes)]
    for policy, row in rates.items():
        line = f"  {policy}".ljust(width)
        for size in map(str, sizes):
            best = max((one.get(size, 0.0) for other, one in rates.items() if "adaptive" not in other), default=0.0)
            known = size in row and best
            line += (f"{row[size]:,.0f} ({row[size] / best:.2f})" if known else "–").rjust(16)
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        if path.exists():
            print(as_table(path.stem, json.loads(path.read_text())["tokens_per_s"]))
