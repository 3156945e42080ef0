"""Throughput beside other programs', from what `scripts/peers/run` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
