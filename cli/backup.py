"""`speclen backup`: a copy of the database, whole and consistent, while the controller goes on writing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from speclen.console.database import DB_OPTION, reading
from speclen.console.errors import UserError
from speclen.store.connection import Connection, sqlite3


def backup(
    target: Path = typer.Argument(help="File to write. It must not exist, unless --overwrite is given."),
    db: Path = DB_OPTION,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the file."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Copy the database to a file while the controller runs, and check the copy.

    To restore one, stop the controller and start it with --db FILE, or copy FILE to the old place (and remove that
    one's -wal file, if there is one).

    Example: speclen backup speclen-2026-11-21.db
    """
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists: name another file, or give --overwrite")
    with reading(db) as connection:
        num_bytes = copy(connection, target)
    if as_json:
        print(json.dumps({"file": str(target), "bytes": num_bytes}))
    else:
        print(f"{target}: {num_bytes:,} bytes, checked")


def copy(source: Connection, target: Path) -> int:
    """Copy a database of one moment, check it, and only then give it its name; returns its size in bytes."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        copied = sqlite3.connect(unfinished, isolation_level=None)
        try:
            # In one go: in smaller steps every commit of the controller would make the copy start over.
            source.backup(copied)
            # A file of its own, readable from read-only media: no -wal beside it.
            copied.execute("PRAGMA journal_mode = DELETE")
            check(copied)
        finally:
            copied.close()
        num_bytes = unfinished.stat().st_size
        synchronise(unfinished)
        unfinished.replace(target)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{target} cannot be written ({error}): choose another place or make room") from error
    finally:
        for leftover in (unfinished, unfinished.with_name(unfinished.name + "-journal")):
            leftover.unlink(missing_ok=True)
    return num_bytes


def check(connection: Connection) -> None:
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise UserError(f"the copy is damaged ({found}), so the database is, too: see `speclen doctor`")


def synchronise(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
