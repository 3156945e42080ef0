"""`speclen explain`: the reasons for the arm of a batch size, in numbers and words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.learned.history import estimates_of, find_context, last_change
from speclen.cli.learned.tables import short, titles_of
from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.errors import UserError, user_errors
from speclen.controller.analysis.explain import Explanation, in_words, rows_at
from speclen.store.queries import acceptance, contexts, view_rows


def explain(
    batch: int = typer.Option(..., "--batch", min=1, help="Batch size to explain."),
    context: str = typer.Option(
        "", help="Number of a context, or part of its name; default: the one that changed last."
    ),
    db: Path = DB_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the estimates behind a choice: ms per token of every arm, acceptance, the runner-up, the last change.

    Example: speclen explain --batch 8 --db .speclen/speclen.db
    """
    with reading(db) as connection:
        row = find_context(contexts(connection), context)
        if batch > row.max_batch_size:
            raise UserError(f"batch size {batch} is beyond this context's workers: use 1 to {row.max_batch_size}")
        estimates = estimates_of(connection, row.context_id)
        survival = tuple(each.survival for each in acceptance(connection, row.context_id))
        change = last_change(connection, row.context_id, batch)
        learned = [each for each in view_rows(connection, "learned_table") if each["context_id"] == row.context_id]
    arms = {each["arm"]: each for each in learned if each["batch_min"] <= batch <= each["batch_max"]}
    with user_errors():
        explanation = Explanation(str(row.key), batch, rows_at(batch, estimates), survival, change)
    if as_json:
        print(json.dumps(document_of(explanation, arms)))
    else:
        show(explanation, arms)


def document_of(explanation: Explanation, arms: dict[str, Any]) -> dict[str, Any]:
    """The explanation with rows of the view learned_table. arms: these rows of the batch size, by arm."""
    change = explanation.last_change
    return {
        "context": explanation.context,
        "batch_size": explanation.batch_size,
        "arm": str(explanation.chosen.arm),
        "runner_up": explanation.runner_up and str(explanation.runner_up.arm),
        "survival": explanation.survival,
        "rows": [arms[str(row.arm)] for row in explanation.rows],
        "last_change": change
        and {
            "previous_arm": change.previous_arm and str(change.previous_arm),
            "arm": str(change.arm),
            "reason": change.reason,
            "decided_at": change.when,
        },
        "words": in_words(explanation),
    }


def show(explanation: Explanation, arms: dict[str, Any]) -> None:
    """The reasons in words, then the figures of every arm. arms: rows of the view learned_table by arm."""
    console = Console()
    console.print(Text(titles_of([explanation.context], console.width)[explanation.context], style="bold"))
    for sentence in in_words(explanation):
        console.print(sentence, markup=False)
    table = Table(box=None, padding=(0, 1, 0, 0))  # seven columns have to fit into 80
    table.add_column("arm (* in use, = equal)", no_wrap=True)
    for heading in ("tok/step", "step ms", "ms/token", "95% interval", "steps", "source"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in explanation.rows:
        table.add_row(
            f"{row.arm} {'*' if row.is_best else '=' if arms[str(row.arm)]['is_equal'] else ''}",
            *(f"{row.expected_tokens:.2f}", short(1e3 * row.step_s), short(row.ms_per_token)),
            *(f"{short(row.ms_per_token_low)} to {short(row.ms_per_token_high)}", f"{row.num_steps:,}", row.source),
            style="bold" if row.is_best else None,
        )
    console.print(table)
