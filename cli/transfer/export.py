"""`speclen export`: what was learned as a JSON file, to move it between fleets, or as a static table for another engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from speclen.cli.support.database import DB_OPTION, reading
from speclen.cli.support.errors import UserError, wrapped
from speclen.cli.support.files import write_whole
from speclen.cli.transfer.chosen import ChosenTable, chosen_table
from speclen.cli.transfer.formats import WRITERS
from speclen.cli.transfer.state import exported

FORMATS = ("json", *WRITERS)


def export_state(
    file: Path | None = typer.Argument(None, help="File to write; standard output if left out."),
    db: Path = DB_OPTION,
    context: str = typer.Option("", help="Only pairs of models with a context whose name contains this."),
    table_format: Annotated[
        str, typer.Option("--format", help=f"{', '.join(FORMATS)}: all that was learned, or an engine's table.")
    ] = "json",
) -> None:
    """Write what was learned as JSON: pairs of models with their acceptance and contexts; no raw reports.

    With the format of another engine: the best lengths in one context, without n-grams, as a static table for it.

    Example: speclen export learned.json --db .speclen/speclen.db
    """
    if table_format not in FORMATS:
        raise UserError(f"--format {table_format!r} is unknown: use {', '.join(FORMATS)}")
    if table_format != "json":
        export_table(file, db, context, table_format)
        return
    with reading(db) as connection:
        document = exported(connection, context)
    text = json.dumps(document, indent=1)
    if file is None:
        print(text)
        return
    write_whole(file, text)
    num_contexts = sum(len(pair["contexts"]) for pair in document["pairs"])
    print(f"{file}: {num_contexts} contexts, {len(document['pairs'])} pairs", file=sys.stderr)


def export_table(file: Path | None, db: Path, context: str, table_format: str) -> None:
    """Write the best lengths in one context; say on standard error what the format cannot. Raises UserError."""
    chosen = chosen_table(db, context)
    try:
        written = WRITERS[table_format](chosen.ranges)
    except ValueError as error:
        raise UserError(str(error)) from error
    if file is None:
        print(written.text)
    else:
        write_whole(file, written.text)
    for note in (*notes_of(chosen), *written.notes):
        print(wrapped(f"{table_format}: {note}"), file=sys.stderr)


def notes_of(chosen: ChosenTable) -> list[str]:
    """The context, and the batch sizes whose arm in use the table cannot hold."""
    if not chosen.ngram:
        return [f"the lengths in use in {chosen.context}"]
    return [
        f"the best lengths in {chosen.context}",
        f"arms with n-grams are in use at batch sizes {', '.join(chosen.ngram)}: the lengths there are the best without",
    ]
