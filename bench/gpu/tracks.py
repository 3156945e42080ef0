"""The serving tracks on this device: `speclen bench serve` in processes of its own, one after the other."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speclen.bench.gpu.sizes import Sizes

# What serving needs beyond torch and transformers; where it is missing, the tracks are left out.
NEEDED = ("grpc", "grpc_health", "typer", "structlog", "prometheus_client", "sqlite_utils")


def run_tracks(sizes: Sizes, device: str, out: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A line for each track; the whole comparisons are written beside gpu_check.json. A failed one says why."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        say(f"the serving tracks are left out: {', '.join(missing)} not installed")
        return []
    found = []
    for track in sizes.tracks:
        path = out / f"serve-{track}.json"
        done = subprocess.run(command(sizes, device, track, path), capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            found.append({"track": track, "failed": reason})
        else:
            found.append(summary(json.loads(path.read_text("utf-8"))))
        say(f"track {found[-1]}")
    return found


def command(sizes: Sizes, device: str, track: str, path: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "speclen.cli.app", "bench", "serve", "--track", track, *sizes.serve_flags),
        *("--compare", sizes.compare, "--target", sizes.target, "--draft", sizes.draft, "--device", device),
        *("--backend", "torch", "--max-batch-size", str(sizes.batch_sizes[-1]), "--max-length", str(sizes.lengths[-1])),
        *("--out", str(path)),
    ]


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """Ratios of adaptive, and what the check of outputs found, which ended the run if one was wrong."""
    return {
        "track": document["track"],
        "num_rounds": document["num_rounds"],
        "best_fixed": document["best_fixed"],
        "ratios": {one["reference"]: one["interval"] for one in document["ratios"]},
        "outputs": document["outputs"],
        "failures": document["errors"],
    }
