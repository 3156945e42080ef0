"""`speclen profile plot`: a profile as three panels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from speclen.bench.profile.analysis import Analysis
from speclen.bench.profile.document import ProfileDocument
from speclen.cli.support.errors import UserError


def plot(document: ProfileDocument, analysis: Analysis, out: Path) -> None:
    """Time per token by length, survival by position, and step time with the fitted surface. PNG or SVG by the suffix.

    Raises UserError when matplotlib is missing, the suffix is unknown or the file cannot be written.
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{out}: the plot's format follows the name, use .png, .svg or .pdf")
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'speclen[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    context = document.context
    figure.suptitle(f"{context.target} with {context.draft}, {context.dtype} on {context.device}", fontsize=10)
    colours = plt.colormaps["viridis"](np.linspace(0, 0.9, len(analysis.batches)))
    draw_time_per_token(left, analysis, colours)
    draw_survival(middle, document, analysis)
    draw_step_times(right, analysis, colours)
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    finally:
        plt.close(figure)


def draw_time_per_token(axes: Any, analysis: Analysis, colours: Any) -> None:
    for batch, colour in zip(analysis.batches, colours, strict=True):
        axes.plot(*points(batch.ms_per_token), "o-", color=colour, markersize=3, label=f"batch {batch.batch_size}")
        best = batch.best_length
        axes.plot(best, batch.ms_per_token[best], "*", color="crimson", markersize=13, zorder=3)
    axes.set(title="Time per token; stars: best measured", xlabel="speculation length", ylabel="ms per token and row")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def draw_survival(axes: Any, document: ProfileDocument, analysis: Analysis) -> None:
    survival = document.profile.survival
    positions = np.arange(1, len(survival) + 1)
    axes.plot(positions, survival, "o-", label="survival")
    axes.plot(positions, np.cumsum(survival), "s-", label="accepted tokens per step")
    if analysis.paper is not None:
        paper = analysis.paper
        label = f"{paper.c:.2f} s^{paper.gamma:.2f} (paper's model)"
        axes.plot(positions, paper.c * positions**paper.gamma, "--", color="grey", label=label)
    axes.set(title="Acceptance", xlabel="draft position", ylabel="probability, tokens")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def draw_step_times(axes: Any, analysis: Analysis, colours: Any) -> None:
    for batch, colour in zip(analysis.batches, colours, strict=True):
        lengths, times = points(batch.step_ms)
        axes.plot(lengths, times, "o", color=colour, markersize=4, label=f"batch {batch.batch_size}")
        if analysis.paper is not None:
            fitted = [1e3 * analysis.paper.step_s(batch.batch_size, length) for length in lengths]
            axes.plot(lengths, fitted, "-", color=colour, linewidth=1)
    axes.set(title="Step time; lines: paper's model", xlabel="speculation length", ylabel="ms per step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    lengths = sorted(values)
    return lengths, [values[length] for length in lengths]
