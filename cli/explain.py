"""`speclen explain`: why a batch size gets its length, in numbers and words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from speclen.console.database import DB_OPTION, reading
from speclen.console.errors import UserError
from speclen.console.history import check_worker, find_context, key_of, last_change, name_of, restored
from speclen.controller.analysis.explain import Explanation, in_words
from speclen.controller.analysis.explain import explain as explain_choice
from speclen.store.queries import load_state


def explain(
    batch: int = typer.Option(..., "--batch", min=1, help="Batch size to explain."),
    context: str = typer.Option(
        "", help="Number of the context, or part of its name; may be left out if there is one."
    ),
    worker: str = typer.Option("", help="As this worker sees it, where it is unlike the others."),
    db: Path = DB_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the estimates behind a choice: survival, step times, ms per token, the runner-up, the last change.

    Example: speclen explain --batch 8 --db .speclen/speclen.db
    """
    with reading(db) as connection:
        stored = load_state(connection)
        row = find_context(stored, context)
        if worker:
            check_worker(stored, row, worker)
        controller = restored(stored, row)
        key = key_of(row)
        if not 1 <= batch <= row.max_batch_size:
            raise UserError(f"batch size {batch} is beyond this context's workers: use 1 to {row.max_batch_size}")
        bucket = controller.context(key).buckets[controller.bucket_index(key, batch)]
        # Of workers that are unlike the others no decisions are stored.
        apart = bool(worker) and any(controller.models_of(key, worker))
        change = None if apart else last_change(connection, row.context_id, bucket.batch_min)
    try:
        explanation = explain_choice(controller, key, batch, change, worker)
    except ValueError as error:
        raise UserError(str(error)) from error
    if as_json:
        print(json.dumps(asdict(explanation) | {"words": in_words(explanation)}))
    else:
        show(explanation)


def show(explanation: Explanation) -> None:
    """Words first, then the figures of every length."""
    console = Console()
    console.print(f"[bold]{name_of(explanation.context)}[/bold]")
    for sentence in in_words(explanation):
        console.print(sentence)
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)  # eight columns have to fit into 80
    for heading in (
        "length",
        "survival",
        "tok/step",
        "step ms",
        "ms/token",
        "95% interval",
        "steps",
        "source",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in explanation.rows:
        one = row.estimate
        length = one.speculation_length
        survival = f"{100 * explanation.survival[length - 1]:.0f}%" if length else ""
        table.add_row(
            f"{length} *" if row.is_best else str(length),
            *(survival, f"{one.expected_tokens:.2f}", f"{1e3 * one.step_s:.2f}", f"{one.ms_per_token:.3f}"),
            *(f"{one.ms_per_token_low:.2f} to {one.ms_per_token_high:.2f}", str(row.num_steps), row.source),
            style="bold" if row.is_best else None,
        )
    console.print(table)
