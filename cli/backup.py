"""`speclen backup`: a copy of the database, whole and consistent, while the controller goes on writing."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from speclen.cli.support.database import DB_OPTION, copy_database
from speclen.cli.support.errors import UserError


def backup(
    target: Path = typer.Argument(help="File to write. It must not exist, unless --overwrite is given."),
    db: Path = DB_OPTION,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the file."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Copy the database while the controller runs, and check the copy. `speclen restore` puts it back.

    For continuous backups use Litestream: docs/guides/backups.md.

    Example: speclen backup speclen-copy.db
    """
    if target.exists() and db.exists() and target.samefile(db):
        raise UserError(f"{target} is the database itself: name another file for its copy")
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists: name another file, or give --overwrite")
    num_bytes = copy_database(db, target)
    if as_json:
        print(json.dumps({"file": str(target), "bytes": num_bytes}))
    else:
        print(f"{target}: {num_bytes:,} bytes, checked")
