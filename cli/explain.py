"""`speclen explain`: why an arm is in use at a batch size, in words and numbers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.output import UserError, user_errors
from speclen.cli.tables import held_at, is_meant, short, titles_of
from speclen.controller.analysis.explain import Change, Explanation, in_words, rows_at
from speclen.records import Arm, ArmEstimate
from speclen.store.connection import Connection
from speclen.store.queries import acceptance, arm_estimates, contexts, holds, newest_decision, view_rows
from speclen.store.schema import ContextRow, filled


def explain(
    batch: int = typer.Option(..., "--batch", min=1, help="Batch size to explain."),
    context: str = typer.Option(
        "", help="Number of a context, or part of its name; default: the one that changed last."
    ),
    db: Path = DB_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show the estimates behind an arm: ms per token of every arm, acceptance, the runner-up, the last change.

    Example: speclen explain --batch 8 --db .speclen/speclen.db
    """
    with reading(db) as connection:
        row = find_context(contexts(connection), context)
        if batch > row.max_batch_size:
            raise UserError(f"no worker of this context runs batch size {batch}: use 1 to {row.max_batch_size}")
        estimates = estimates_of(connection, row.context_id)
        survival = tuple(each.survival for each in acceptance(connection, row.context_id))
        change = last_change(connection, row.context_id, batch)
        held = held_at(holds(connection), row.context_id, batch, batch)
        learned = [each for each in view_rows(connection, "learned_table") if each["context_id"] == row.context_id]
    arms = {each["arm"]: each for each in learned if each["batch_min"] <= batch <= each["batch_max"]}
    with user_errors():
        explanation = Explanation(str(row.key), batch, rows_at(batch, estimates), survival, change)
    if as_json:
        print(json.dumps(document_of(explanation, arms) | {"held": held}))
        return
    show(explanation, arms)
    if held:
        print(f"\nHeld here by `speclen hold`: {held}. `speclen hold --release` ends it.")


def find_context(known: tuple[ContextRow, ...], text: str) -> ContextRow:
    """The context that matches the text, by default the one that changed last. UserError unless exactly one matches."""
    if not known:
        raise UserError("the database holds no context yet: start a worker with this controller first")
    if not text:
        return max(known, key=attrgetter("updated_at"))
    found = [row for row in known if is_meant(text, row.context_id, str(row.key))]
    names = "; ".join(f"{row.context_id}: {row.key}" for row in known)
    if not found:
        raise UserError(f"no context is called {text!r}; known are {names}")
    if len(found) > 1:
        raise UserError(f"{text!r} matches several contexts; give the number of one with --context: {names}")
    return found[0]


def estimates_of(connection: Connection, context_id: int) -> list[ArmEstimate]:
    """The learned table of a context."""
    return [
        filled(
            ArmEstimate,
            row,
            arm=Arm(row.speculation_length, row.ngram),
            ms_per_token=1e3 * row.step_s / row.expected_tokens,
        )
        for row in arm_estimates(connection, context_id)
    ]


def last_change(connection: Connection, context_id: int, batch_size: int) -> Change | None:
    """The newest change of arm at a batch size."""
    row = newest_decision(connection, context_id, batch_size)
    if row is None:
        return None
    first = row.previous_speculation_length is None
    previous = None if first else Arm(row.previous_speculation_length or 0, bool(row.previous_ngram))
    when = datetime.fromtimestamp(row.decided_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Change(previous, Arm(row.speculation_length, row.ngram), row.reason, when)


def document_of(explanation: Explanation, arms: dict[str, Any]) -> dict[str, Any]:
    """The explanation as JSON. arms: rows of the view learned_table for this batch size, by arm."""
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
    """Print the reasons in words, then a row for every arm. arms: rows of the view learned_table, by arm."""
    console = Console()
    console.print(Text(titles_of([explanation.context], console.width)[explanation.context], style="bold"))
    for sentence in in_words(explanation):
        console.print(sentence, markup=False)
    table = Table(box=None, padding=(0, 1, 0, 0))  # so that seven columns fit into 80 characters
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
