"""`speclen profile show`: a profile as tables."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.profile.analysis import Analysis, BatchAnalysis, expected_tokens
from speclen.cli.profile.document import ProfileDocument
from speclen.cli.profile.paper_model import LONGEST, PaperModel


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def show(document: ProfileDocument, analysis: Analysis) -> None:
    """Time per token with the best marked, survival, and the fitted model with where it errs."""
    out = console()
    context = document.context
    out.print(f"[bold]{context.target}[/] with {context.draft}, {context.dtype} on {context.device}", soft_wrap=True)
    prior = ", measured elsewhere: a starting point only" if document.profile.as_prior else ""
    out.print(
        f"{context.engine_fingerprint}; {document.measured_at} UTC; {document.profile.source}{prior}", soft_wrap=True
    )
    out.print("\nms per token and row, by speculation length (down) and batch size (across); * is least")
    out.print(time_table(analysis))
    out.print(survival_line(document))
    if analysis.paper is None:
        out.print(f"The paper's model is not determined: {analysis.paper_failure}.")
        return
    out.print(paper_lines(analysis.paper))
    out.print("\nBest length: measured, and chosen from this profile; in brackets how much slower that is, as measured")
    out.print(choice_table(analysis))


def time_table(analysis: Analysis) -> Table:
    """One row per length, one column per batch size."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for heading in ("length", *(str(batch.batch_size) for batch in analysis.batches)):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in sorted({length for batch in analysis.batches for length in batch.ms_per_token}):
        table.add_row(str(length), *(time_cell(batch, length) for batch in analysis.batches))
    gains = ("" if batch.gain is None else f"{batch.gain:.2f}x" for batch in analysis.batches)
    table.add_row("gain over 0", *gains)
    return table


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
    tokens = expected_tokens(profile, len(profile.survival))
    return (
        f"survival by position: {shares} (of {rows} rows); {tokens:.2f} tokens a step at length {len(profile.survival)}"
    )


def paper_lines(paper: PaperModel) -> str:
    slopes = ", ".join(f"{size}: {1e3 * slope:.3g}" for size, slope in paper.slope_s.items())
    accepted = f"accepted {paper.c:.3g} * s^{paper.gamma:.3g} (error {paper.accepted_error:.1%})"
    step = f"step {1e3 * paper.beta_s:.3g} ms + s * A_b (error {paper.step_error:.1%})"
    return f"The paper's model: {accepted}; {step}, A_b in ms by batch size: {slopes}"


def choice_table(analysis: Analysis) -> Table:
    table = Table()
    for name in ("batch", "measured", "paper's model", "its optimum", "its ceiling", "our estimator"):
        table.add_column(name, justify="right")
    for batch in analysis.batches:
        table.add_row(
            str(batch.batch_size),
            str(batch.best_length),
            choice(batch.paper_length, batch.paper_excess),
            within(batch.paper_optimum),
            within(batch.paper_ceiling),
            choice(batch.estimator_length, batch.estimator_excess),
        )
    return table


def within(length: float | None) -> str:
    if length is None:
        return ""
    return f"over {LONGEST}" if length >= LONGEST else f"{length:.2f}"


def choice(length: int | None, excess: float | None) -> str:
    if length is None:
        return ""
    return f"{length} (not measured)" if excess is None else f"{length} ({excess:.1%})"
