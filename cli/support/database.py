"""Opening the database for a verb: what is wrong with it is the user's to mend, so it ends as one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import typer

from speclen.cli.support.errors import UserError
from speclen.store.backup import copy
from speclen.store.connection import Connection, FileErrors, StoreError, connect_reader, refusal

DATABASE = Path(".speclen") / "speclen.db"
DB_OPTION = typer.Option(DATABASE, "--db", metavar="FILE", help="Database of a controller, running or not.")


def reading(path: Path) -> AbstractContextManager[Connection]:
    """A read-only connection. Raises UserError if the file is missing, not speclen's, or damaged."""
    return told(path, lambda: closing(connect_reader(path)))


@contextmanager
def told(path: Path, connect: Callable[[], AbstractContextManager[Connection]]) -> Iterator[Connection]:
    """A connection whose errors of the file become UserErrors."""
    try:
        with connect() as connection:
            yield connection
    except StoreError as error:
        raise UserError(str(error)) from error
    except FileErrors as error:
        raise UserError(str(refusal(path, error))) from error


def copy_database(path: Path, target: Path) -> int:
    """Copy a database that may be in use; returns the copy's size in bytes. Raises UserError where that cannot be done."""
    with reading(path) as connection:
        return copy(connection, target)
