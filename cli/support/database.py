"""Opening the database for a verb: what is wrong with it is the user's to mend, so it ends as one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import typer

from speclen.cli.support.output import UserError, say, user_errors
from speclen.process.embedded import DATA_DIR, DATABASE_NAME, data_directory
from speclen.store.backup import copy
from speclen.store.connection import Connection, FileErrors, StoreError, connect_reader, refusal

HERE = Path(".speclen") / DATABASE_NAME  # where `speclen up` and `speclen controller` keep theirs


def default_database() -> Path:
    """The database of a verb without --db: by SPECLEN_* variables, in this folder, else the embedded controller's.

    Raises UserError where this user has no home.
    """
    if named := os.environ.get("SPECLEN_CONTROLLER_DB"):
        return Path(named)
    if folder := os.environ.get("SPECLEN_CONTROLLER_DATA_DIR"):
        return Path(folder) / DATABASE_NAME
    if DATA_DIR not in os.environ and HERE.exists():
        return HERE
    with user_errors():
        return data_directory() / DATABASE_NAME


def named_or_default(db: Path | None) -> Path:
    """The database of a verb; one that was not named is said."""
    if db is None:
        db = default_database()
        say(f"database {db}")
    return db


DB_OPTION: Any = typer.Option(
    None,
    "--db",
    metavar="FILE",
    callback=named_or_default,
    help="Database of a controller, running or not; default: the one in .speclen here, else in this user's state directory.",
)


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
