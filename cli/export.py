"""`speclen export`: what was learned as a JSON file, to move it between fleets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from speclen.console.database import DB_OPTION, reading
from speclen.console.errors import UserError
from speclen.console.learned_state import exported


def export_state(
    file: Path | None = typer.Argument(None, help="File to write; standard output if left out."),
    db: Path = DB_OPTION,
    context: str = typer.Option("", help="Only contexts of which target, draft, device or dtype contains this."),
) -> None:
    """Write what was learned as JSON: contexts with their step times, pairs with their acceptance; no raw reports.

    Example: speclen export learned.json --db .speclen/speclen.db
    """
    with reading(db) as connection:
        document = exported(connection, context)
    text = json.dumps(document, indent=1)
    if file is None:
        print(text)
        return
    try:
        file.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): choose another place") from error
    print(f"{file}: {len(document['contexts'])} contexts, {len(document['pairs'])} pairs", file=sys.stderr)
