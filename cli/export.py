"""`speclen export`: what was learned as JSON, or the best lengths as a static table for another engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from speclen.cli.formats import WRITERS, Range, merged
from speclen.cli.learned.table import Row, rows_of
from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.errors import UserError, user_errors, wrapped
from speclen.cli.support.files import write_whole

FORMATS = ("json", *WRITERS)


def export(
    file: Path | None = typer.Argument(None, help="File to write; standard output if left out."),
    db: Path = DB_OPTION,
    context: str = typer.Option("", help="Only contexts whose name contains this."),
    table_format: Annotated[
        str, typer.Option("--format", help=f"{', '.join(FORMATS)}: every arm's estimates, or an engine's table.")
    ] = "json",
) -> None:
    """Write the learned table: as JSON every arm at every batch size, the rows of the view learned_table.

    With the format of another engine: the best lengths in one context, without n-grams, as a static table for it.

    Example: speclen export --format vllm --db .speclen/speclen.db
    """
    if table_format not in FORMATS:
        raise UserError(f"--format {table_format!r} is unknown: use {', '.join(FORMATS)}")
    notes: list[str] = []
    if table_format == "json":
        text = json.dumps(rows_of(db, "learned_table", context), indent=1)
    else:
        text, notes = table_for(table_format, db, context)
    if file is None:
        print(text)
    else:
        write_whole(file, text)
    for note in notes:
        print(wrapped(f"{table_format}: {note}"), file=sys.stderr)


def table_for(table_format: str, db: Path, context: str) -> tuple[str, list[str]]:
    """The best lengths in one context, and what the format cannot hold. Raises UserError."""
    rows = rows_of(db, "learned_table", context)
    names = sorted({row["context"] for row in rows})
    if not names:
        raise UserError(f"{db} holds no learned table yet: let a worker decode a few steps first")
    if len(names) > 1:
        raise UserError(f"--context {context!r} matches several contexts: name one of {'; '.join(names)}")
    ngram = [row["batch_bucket"] for row in rows if row["ngram"] and row["is_best"]]
    notes = [f"the lengths in use in {names[0]}"]
    if ngram:
        notes = [
            f"the best lengths in {names[0]}",
            f"arms with n-grams are in use at batch sizes {', '.join(ngram)}: the lengths there are the best without",
        ]
    with user_errors():
        text, limits = WRITERS[table_format](merged(best_lengths(rows)))
    return text, notes + limits


def best_lengths(rows: list[Row]) -> list[Range]:
    """The length in use at each range, or the best one where the arm in use has n-grams."""
    best: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: (not row["is_best"], row["ms_per_token"])):
        if not row["ngram"]:
            best.setdefault(row["batch_min"], row)
    return [Range(row["batch_min"], row["batch_max"], row["speculation_length"]) for row in best.values()]
