"""A profile analysed: time per token, the best lengths and what the estimator makes of them, as tables and as a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.profile.document import ProfileDocument
from speclen.cli.support.errors import UserError
from speclen.controller.estimator import Estimator
from speclen.records import Limits, Profile, ProfileCell


@dataclass(frozen=True, slots=True)
class BatchAnalysis:
    """One batch size of a profile.

    ms_per_token: measured, by length. best_length: the least of them. estimator_length: what our estimator chooses from the
    same profile. estimator_excess: how much slower than the best that is, as measured; None where it was not measured.
    """

    batch_size: int
    ms_per_token: dict[int, float]
    best_length: int
    estimator_length: int
    estimator_excess: float | None

    @property
    def gain(self) -> float | None:
        """Speed of the best length over length 0."""
        return self.ms_per_token[0] / self.ms_per_token[self.best_length] if 0 in self.ms_per_token else None


def expected_tokens(profile: Profile, length: int) -> float:
    """Tokens per row and step at a length, bonus included. Raises IndexError past the profiled survival."""
    if length > len(profile.survival):
        raise IndexError(length)
    return 1.0 + sum(profile.survival[:length])


def ms_per_token(profile: Profile, cell: ProfileCell) -> float:
    return 1e3 * cell.step_s / expected_tokens(profile, cell.speculation_length)


def analyse(document: ProfileDocument) -> list[BatchAnalysis]:
    """All batch sizes, ascending: what was measured, and what the estimator makes of it."""
    profile, chosen = document.profile, estimator_lengths(document)
    found = []
    for size in sorted(chosen):
        cells = [cell for cell in profile.cells if cell.batch_size == size]
        times = {cell.speculation_length: ms_per_token(profile, cell) for cell in cells}
        best, length = min(times, key=lambda length: times[length]), chosen[size]
        excess = times[length] / times[best] - 1 if length in times else None
        found.append(BatchAnalysis(size, times, best, length, excess))
    return found


def estimator_lengths(document: ProfileDocument) -> dict[int, int]:
    """The choice of a fresh estimator, seeded with this profile alone, at every profiled batch size."""
    profile = document.profile
    sizes = {cell.batch_size for cell in profile.cells}
    longest = max(cell.speculation_length for cell in profile.cells)
    estimator = Estimator(limits=Limits(max(sizes), max(longest, len(profile.survival))))
    estimator.seed(profile)
    return {size: estimator.arm_for(size).speculation_length for size in sizes}


def analysis_json(document: ProfileDocument, batches: list[BatchAnalysis]) -> dict[str, Any]:
    """The profile with everything that `speclen profile show` says about it."""
    best = [asdict(batch) | {"gain_over_length_0": batch.gain} for batch in batches]
    return document.to_json() | {"best": best}


def show(document: ProfileDocument, analysis: list[BatchAnalysis]) -> None:
    """Time per token with the best marked, the estimator's choice, and survival."""
    out, context = Console(highlight=False, markup=False), document.context
    out.print(f"{context.target} with {context.draft}, {context.dtype} on {context.device}", style="bold")
    out.print(f"{context.engine_fingerprint}; {document.measured_at}; {document.profile.source}")
    out.print("\nms per token, by speculation length (down) and batch size (across); * is least")
    out.print(time_table(analysis))
    out.print(survival_line(document))


def time_table(analysis: list[BatchAnalysis]) -> Table:
    """One row per length, one column per batch size."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for heading in ("length", *(str(batch.batch_size) for batch in analysis)):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in sorted({length for batch in analysis for length in batch.ms_per_token}):
        table.add_row(str(length), *(time_cell(batch, length) for batch in analysis))
    gains = ("" if batch.gain is None else f"{batch.gain:.2f}x" for batch in analysis)
    table.add_row("gain over 0", *gains)
    table.add_row("our estimator", *(choice(batch.estimator_length, batch.estimator_excess) for batch in analysis))
    return table


def choice(length: int, excess: float | None) -> str:
    """The length that the estimator selects, and how much slower than the best it is, as measured."""
    return f"{length} (+{excess:.0%})" if excess else f"{length}"


def time_cell(batch: BatchAnalysis, length: int) -> Text:
    value = batch.ms_per_token.get(length)
    if value is None:
        return Text("")
    best = length == batch.best_length
    return Text(f"{'*' if best else ''}{value:.3g}", style="bold green" if best else "")


def survival_line(document: ProfileDocument) -> str:
    profile = document.profile
    if not profile.survival:
        return "No survival was measured: only length 0 was run."
    shares = " ".join(f"{value:.3f}" for value in profile.survival)
    rows = ", ".join(f"{count:,}" for count in profile.num_survival_rows)
    longest = len(profile.survival)
    tokens = f"{expected_tokens(profile, longest):.2f} tokens a step at length {longest}"
    return f"survival by position: {shares} (of {rows} sequences); {tokens}"


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
