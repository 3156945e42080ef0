"""A comparison as a JSON file: every block, what follows from them, and what they were measured on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speclen.bench.comparison.rounds import Comparison, to_rows
from speclen.cli.support.files import write_whole


def to_document(comparison: Comparison, facts: dict[str, Any]) -> dict[str, Any]:
    """facts: what the figures depend on; everything but single requests is in the result."""
    first, *others = comparison.policies
    return {
        **facts,
        "policies": list(comparison.policies),
        "num_rounds": len(comparison.rounds),
        "resolution": comparison.resolution,
        "mean_latency_s": {name: comparison.mean_latency_s(name) for name in comparison.policies},
        "best_fixed": comparison.best_fixed(),
        "ratios": [asdict(comparison.ratio(first, name)) for name in others],
        "notes": comparison.notes(),
        "errors": comparison.errors(),
        "rounds": to_rows(comparison.rounds),
    }


def write_document(document: dict[str, Any], path: Path) -> None:
    """Indented but for the rounds, of which each is a line. Raises UserError naming the file."""
    rounds = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in document["rounds"])
    head = json.dumps({key: value for key, value in document.items() if key != "rounds"}, indent=1)[:-2]
    write_whole(path, f'{head},\n "rounds": [\n  {rounds}\n ]\n}}')
