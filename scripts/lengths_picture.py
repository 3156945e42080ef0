"""Draw the README's picture: how the length follows the load, from a committed result of `speclen bench serve`.

Example: python scripts/lengths_picture.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"adaptive": "learned online", "profile": "table measured offline", "oracle": "best by exhaustive survey"}
STYLES = {"adaptive": ("black", 2.2), "profile": ("tab:red", 1.2), "oracle": ("tab:green", 1.2)}


def first_run(result: dict[str, Any], contender: str) -> list[dict[str, Any]]:
    """Stretches of the first repeat of a policy."""
    return next(run["over_time"] for run in result["runs"] if (run["contender"], run["repeat"]) == (contender, 0))


def line(axes: Any, stretches: list[dict[str, Any]], field: str, **style: Any) -> None:
    known = [(each["to_s"], each[field]) for each in stretches if each[field] is not None]
    axes.plot(*zip(*known, strict=True), **style)


def draw(result: dict[str, Any], path: Path) -> None:
    """Above the rows of a step, below the length, of the same seconds."""
    figure, (load, length) = pyplot.subplots(2, 1, figsize=(8, 4), sharex=True, layout="constrained")
    line(load, first_run(result, "adaptive"), "mean_batch_size", color="tab:blue")
    load.set_ylabel("requests in a step")
    for contender, name in NAMES.items():
        color, width = STYLES[contender]
        line(length, first_run(result, contender), "mean_length", label=name, color=color, linewidth=width)
    length.set_ylabel("tokens speculated")
    length.set_xlabel(f"seconds; {result['worker']['target']} on {result['context']['device']}")
    length.legend(fontsize="small", ncols=3, loc="lower right")
    for axes in (load, length):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, default=ROOT / "docs/results/serve/time-varying.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/lengths.png")
    options = parser.parse_args()
    draw(json.loads(options.result.read_text("utf-8")), options.out)
