"""`speclen profile plot`: time per token by length, a line for each batch size."""

from __future__ import annotations

from pathlib import Path

from speclen.cli.profile.analysis import BatchAnalysis
from speclen.cli.profile.document import ProfileDocument
from speclen.cli.support.errors import UserError


def plot(document: ProfileDocument, analysis: list[BatchAnalysis], out: Path) -> None:
    """Draw a file in the format of its suffix.

    Raises UserError when matplotlib is missing, the suffix is unknown or the file cannot be written.
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"{out} names no format for a plot: use .png, .svg or .pdf")
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'speclen[plot]'") from error
    figure, context = Figure(figsize=(8, 5), layout="constrained"), document.context
    axes = figure.subplots()
    for index, batch in enumerate(analysis):
        lengths, best = sorted(batch.ms_per_token), batch.best_length
        colour = colormaps["viridis"](0.9 * index / len(analysis))
        times = [batch.ms_per_token[length] for length in lengths]
        axes.plot(lengths, times, "o-", color=colour, markersize=3, label=f"batch {batch.batch_size}")
        axes.plot(best, batch.ms_per_token[best], "*", color="crimson", markersize=13, zorder=3)
    title = f"{context.target} with {context.draft}, {context.dtype} on {context.device}; stars: best"
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="speculation length", ylabel="ms per token and sequence", ylim=(0, None))
    axes.legend(fontsize=8)
    try:
        figure.savefig(out, dpi=130)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}): choose another place") from error
