"""`speclen backup` and `speclen restore`."""

from __future__ import annotations

from pathlib import Path

import typer

from speclen.cli.support.database import DB_OPTION, HERE, copy_database
from speclen.cli.support.output import UserError, say, user_errors
from speclen.store.backup import check_file, is_empty, put_in_place
from speclen.store.connection import StoreError


def backup(
    target: Path = typer.Argument(help="File to write. It must not exist, unless --overwrite is given."),
    db: Path = DB_OPTION,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the file."),
) -> None:
    """Copy the database while the controller runs, and check the copy. `speclen restore` restores it.

    For continuous backups, use Litestream: docs/guides/backups.md.

    Example: speclen backup speclen-copy.db
    """
    if target.exists() and db.exists() and target.samefile(db):
        raise UserError(f"{target} is the database itself: name another file for its copy")
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists: name another file, or give --overwrite")
    print(f"{target}: {copy_database(db, target):,} bytes, checked")


def restore(
    source: Path = typer.Argument(help="Backup file."),
    db: Path = typer.Option(HERE, "--db", metavar="FILE", help="Database to write. Stop its controller first."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the database."),
) -> None:
    """Restore the database from a backup, while no controller runs on it.

    Workers register again by themselves. Reports acknowledged after the backup
    are lost; the controller says how many commits are missing.

    Example: speclen restore speclen-copy.db --db .speclen/speclen.db
    """
    if not is_empty(db) and not overwrite:
        raise UserError(f"{db} exists: name another file with --db, or give --overwrite")
    if not source.is_file():
        raise UserError(f"there is no backup at {source}: name a file that `speclen backup` wrote")
    with user_errors(StoreError):
        check_file(source)
        put_in_place(source, db)
    say(f"{db}: restored from {source}")
