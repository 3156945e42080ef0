"""Draws a comparison: latency of every policy, and batch size and length over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speclen.bench.comparison.compare import Comparison
from speclen.bench.comparison.summary import RunSummary
from speclen.console.errors import UserError


def plot(comparison: Comparison, path: Path) -> None:
    """Raises UserError when matplotlib is not installed or the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise UserError('--plot needs matplotlib: pip install "speclen[plot]"') from error
    figure, (latency, batch, length) = pyplot.subplots(
        3, 1, figsize=(9, 10), height_ratios=(2, 1, 1), layout="constrained"
    )
    draw_latency(latency, comparison)
    draw_over_time(batch, comparison, "mean_batch_size", "rows per step")
    draw_over_time(length, comparison, "mean_length", "length used")
    length.set_xlabel("seconds since the track began (first repeat)")
    handles, labels = length.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=8)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the plot {path}: {error}") from error
    pyplot.close(figure)


def draw_latency(axes: Any, comparison: Comparison) -> None:
    """Bars: mean over repeats; dots: single repeats; ticks: 95th percentile."""
    for position, contender in enumerate(comparison.contenders):
        runs = [run.latency for run in comparison.of(contender) if run.latency]
        if not runs:
            continue
        axes.bar(position, sum(run.mean for run in runs) / len(runs), color="tab:blue", alpha=0.6)
        axes.plot([position] * len(runs), [run.mean for run in runs], "k.", markersize=5)
        axes.plot([position] * len(runs), [run.p95 for run in runs], "_", color="tab:red", markersize=14)
    axes.set_xticks(range(len(comparison.contenders)), comparison.contenders, rotation=30)
    axes.set_ylabel("request latency, s")
    axes.set_title(f"{comparison.track.name}: mean (bars, dots per repeat) and 95th percentile (red)")
    axes.set_ylim(bottom=0)


def draw_over_time(axes: Any, comparison: Comparison, field: str, label: str) -> None:
    for contender, style in styles(comparison.contenders).items():
        first = next((run for run in comparison.of(contender) if run.repeat == 0), None)
        if first is not None:
            axes.plot(*points(first, field), label=contender, **style)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)


def styles(contenders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each line is drawn: the first, which it is about, in front; fixed lengths thin, darker the shorter they are."""
    from matplotlib import colormaps

    first, *rest = contenders
    fixed = [name for name in rest if name.startswith("fixed:")]
    others = [name for name in rest if name not in fixed]
    shades, colors = colormaps["viridis"], colormaps["Set1"]
    found: dict[str, dict[str, Any]] = {first: {"color": "black", "linewidth": 2, "zorder": 3}}
    for place, name in enumerate(others):
        found[name] = {"color": colors(place % colors.N), "linewidth": 1.2}
    for place, name in enumerate(fixed):
        found[name] = {"color": shades(place / len(fixed)), "linewidth": 0.6, "linestyle": "--"}
    return found


def points(run: RunSummary, field: str) -> tuple[Sequence[float], Sequence[float]]:
    known = [(stretch.to_s, value) for stretch in run.over_time if (value := getattr(stretch, field)) is not None]
    return [at_s for at_s, _ in known], [value for _, value in known]
