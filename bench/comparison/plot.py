"""Draws a comparison over the course of its blocks: latency, rows and tokens proposed, by policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speclen.bench.comparison.document import comparison_of
from speclen.bench.serving.block import Bin
from speclen.cli.support.errors import UserError

FIELDS = tuple(Bin.__dataclass_fields__)
# what is drawn: of, by
PANELS = (
    ("mean latency of requests arriving then, s", "latency_sum_s", "num_requests"),
    ("rows per step", "num_row_steps", "num_steps"),
    ("tokens proposed per row", "num_proposed", "num_row_steps"),
)


def plot(document: dict[str, Any], path: Path) -> None:
    """Raises UserError when matplotlib is not installed or the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "speclen"  # the same file for the same figures
        from matplotlib import pyplot
    except ImportError as error:
        raise UserError('--plot needs matplotlib: pip install "speclen[plot]"') from error
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 9), height_ratios=(2, 1, 1.3), layout="constrained", sharex=True)
    names = drawn(document)
    rounds = [row["blocks"] for row in document["rounds"] if all(name in row["blocks"] for name in names)]
    for axis, (label, above, below) in zip(axes, PANELS, strict=True):
        for name in names:
            seconds, values = course(rounds, name, above, below)
            axis.plot(seconds, values, label=name, **style(name, names))
        axis.set(ylabel=label)
        axis.set_ylim(bottom=0)
    axes[0].set_title(
        f"{document['track']}: means over {len(rounds)} blocks that all of these served, by second of the block"
    )
    axes[-1].set_xlabel("seconds since the block began")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=9, ncols=6)
    try:
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the plot {path}: {error}") from error
    pyplot.close(figure)


def drawn(document: dict[str, Any]) -> list[str]:
    """Policies that are drawn: of the fixed lengths, the best one and none."""
    best = comparison_of(document).best_fixed()
    return [name for name in document["policies"] if not name.startswith("fixed:") or name == best]


def course(
    rounds: Sequence[dict[str, Any]], name: str, above: str, below: str
) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds of the block, and one sum over another in them, of this policy's part of these rounds."""
    if not rounds:
        return [], []
    sums = np.array([blocks[name]["bins"] for blocks in rounds], dtype=float).sum(axis=0)  # [seconds, fields]
    known = np.flatnonzero(sums[:, FIELDS.index(below)] > 0)
    values = sums[known, FIELDS.index(above)] / sums[known, FIELDS.index(below)]
    return (known + 0.5).tolist(), values.tolist()


def style(name: str, names: Sequence[str]) -> dict[str, Any]:
    """How a line is drawn: the first policy, which it is about, in front; the others in colours of their own."""
    from matplotlib import colormaps

    if name == names[0]:
        return {"color": "black", "linewidth": 2.2, "zorder": 3}
    color = colormaps["tab10"](names.index(name) % 10)
    return {"color": color, "linewidth": 1.3, "linestyle": "--" if name == "none" or name.startswith("fixed:") else "-"}
