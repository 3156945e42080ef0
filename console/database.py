"""Opening the database for a verb: what is wrong with it is the user's to mend, so it ends as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from speclen.console.errors import UserError
from speclen.store.backup import copy
from speclen.store.connection import Connection, StoreError, connect_reader, refusal, sqlite3

DATABASE = Path(".speclen") / "speclen.db"
DB_OPTION = typer.Option(DATABASE, "--db", metavar="FILE", help="Database of a controller, running or not.")


@contextmanager
def reading(path: Path) -> Iterator[Connection]:
    """A read-only connection. Raises UserError if the file is missing, not speclen's, or damaged."""
    try:
        connection = connect_reader(path)
    except StoreError as error:
        raise UserError(str(error)) from error
    try:
        yield connection
    except sqlite3.DatabaseError as error:
        raise UserError(str(refusal(path, error))) from error
    finally:
        connection.close()


def copy_database(path: Path, target: Path) -> int:
    """Copy a database that may be in use; returns the copy's size in bytes. Raises UserError where that cannot be done."""
    try:
        with reading(path) as connection:
            return copy(connection, target)
    except StoreError as error:
        raise UserError(str(error)) from error
