"""Tokens per second by policy and number of requests, as tables: python -m speclen.bench.rates RESULT.json..."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

Rates = Mapping[str, Mapping[str, float]]  # by policy, by requests at once


def as_table(name: str, rates: Rates) -> str:
    """Tokens per second, and in brackets the share of the best policy that is not `adaptive`, by requests at once."""
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
