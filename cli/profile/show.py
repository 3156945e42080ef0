"""`speclen profile show`: a profile as tables."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.profile.analysis import Analysis, BatchAnalysis, expected_tokens
from speclen.cli.profile.document import ProfileDocument


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def show(document: ProfileDocument, analysis: Analysis) -> None:
    """Time per token with the best marked, the estimator's choice, and survival."""
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


def time_table(analysis: Analysis) -> Table:
    """One row per length, one column per batch size."""
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    for heading in ("length", *(str(batch.batch_size) for batch in analysis.batches)):
        table.add_column(heading, justify="right", no_wrap=True)
    for length in sorted({length for batch in analysis.batches for length in batch.ms_per_token}):
        table.add_row(str(length), *(time_cell(batch, length) for batch in analysis.batches))
    gains = ("" if batch.gain is None else f"{batch.gain:.2f}x" for batch in analysis.batches)
    table.add_row("gain over 0", *gains)
    table.add_row(
        "our estimator", *(choice(batch.estimator_length, batch.estimator_excess) for batch in analysis.batches)
    )
    return table


def choice(length: int, excess: float | None) -> str:
    """The length that the estimator selects, and how much slower than the best it is, as measured."""
    return f"{length}" if excess is None else f"{length} (+{excess:.0%})"


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
