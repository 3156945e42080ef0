"""Tokens per second by policy and number of requests, as tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

Rates = dict[str, dict[str, float]]  # by policy, by requests at once


def as_table(name: str, rates: Rates) -> str:
    """Tokens per second, and in brackets the share of the best policy that is not `adaptive`, by requests at once."""
    sizes = sorted({int(size) for row in rates.values() for size in row})
    lines = [f"{name}, tokens/s".ljust(20) + "".join(f"{size} at once".rjust(16) for size in sizes)]
    for policy, row in rates.items():
        line = f"  {policy}".ljust(20)
        for size in map(str, sizes):
            best = max((one.get(size, 0.0) for other, one in rates.items() if other != "adaptive"), default=0.0)
            known = size in row and best
            line += (f"{row[size]:,.0f} ({row[size] / best:.2f})" if known else "–").rjust(16)
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_table("vLLM", json.loads(Path(sys.argv[1]).read_text())["tokens_per_s"]))
