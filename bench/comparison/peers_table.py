"""Throughput beside other programs', from what `scripts/peers/run` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AIM = 1.15  # times the throughput of the best mode of all peers, at every number of requests at a time


def aims(path: Path) -> list[str]:
    """A row of the table of aims for every number of requests at a time."""
    if not path.exists():
        return []
    rows = []
    for one in json.loads(path.read_text("utf-8"))["speclen_over_best"]:
        if one["what"] != "throughput of adaptive over the best mode of" or one["peer"] != "any of them":
            continue
        low, value, high = one["ratio_low"], one["ratio"], one["ratio_high"]
        fate = "reached" if value >= AIM else "missed"
        if low <= AIM <= high:
            fate += ", within the spread"
        rows.append(
            f"| throughput beside [peers](peers.md), {one['concurrency']} at a time | the best mode of any "
            f"({one['best_mode']}) | at least {AIM:.2f} | {value:.2f} (rounds: {low:.2f} to {high:.2f}) | {fate} |"
        )
    return rows


def table(path: Path) -> str:
    """Tokens a second of adaptive over the best mode of every peer, by requests at a time."""
    if not path.exists():
        return "Nothing has been measured yet."
    content = json.loads(path.read_text("utf-8"))
    rows: list[dict[str, Any]] = content["rows"]
    sizes = sorted({row["concurrency"] for row in rows})
    ours = {row["concurrency"]: row for row in rows if (row["peer"], row["mode"]) == ("speclen", "adaptive")}
    lines = [f"| tokens/s of `adaptive` over the best mode of | {' | '.join(f'{n} at a time' for n in sizes)} |"]
    lines.append("|---|" + "---|" * len(sizes))
    for peer in dict.fromkeys(row["peer"] for row in rows if row["peer"] != "speclen"):
        cells = []
        for size in sizes:
            modes = [row for row in rows if row["peer"] == peer and row["concurrency"] == size]
            best = max(modes, key=lambda row: float(row["tokens_per_s"]), default=None)
            ratio = ours[size]["tokens_per_s"] / best["tokens_per_s"] if best and size in ours else None
            cells.append("–" if best is None or ratio is None else f"{ratio:.2f} ({best['mode']})")
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"Commit `{content['facts'].get('commit')}`; spread and machine in [peers.md](peers.md)."]
    )
