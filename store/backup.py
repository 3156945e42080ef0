"""Copies of a database, each of one moment, whole and checked before it gets its name; and their way back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from speclen.store.connection import (
    ANOTHER_COPY,
    Connection,
    CorruptStoreError,
    FileErrors,
    StoreError,
    checking,
    connect_reader,
    in_one_line,
    primary_code,
    refusal,
    sqlite3,
)
from speclen.store.files import WriterLock, files_of, in_use, is_locked


def copy(source: Connection, target: Path) -> int:
    """Copy an open database to a file, which is replaced if there is one; returns its size in bytes. Raises StoreError."""
    with unfinished(target) as copied:
        if is_locked(target):
            raise StoreError(in_use(target, "one that runs now"))
        fill(copied, source)
        num_bytes = copied.stat().st_size
        move_into_place(copied, target)
    return num_bytes


def fill(file: Path, source: Connection) -> None:
    """Make a file a copy of an open database. StoreError: a damaged source. sqlite3.Error: no room for the file."""
    try:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as copied:
            # In one go: in smaller steps every commit of the controller would make the copy start over.
            source.backup(copied)
            # A file of its own, readable from read-only media: no -wal beside it.
            copied.execute("PRAGMA journal_mode = DELETE")
            found = first_problem(copied)
    except FileErrors as error:
        found = first_reading_problem(source)  # SQLite does not say which of two files an error is about
        if not found and isinstance(error, sqlite3.Error):
            raise
        found = found or in_one_line(error)
    if found:
        path = source.execute("PRAGMA database_list").fetchone()[2]
        raise StoreError(f"{path} cannot be copied ({found}): look at it with `speclen doctor`")


def first_reading_problem(source: Connection) -> str:
    """First problem of an open database, errors of reading included, in one line; empty if there is none."""
    try:
        return first_problem(source)
    except FileErrors as error:
        return in_one_line(error)


def first_problem(connection: Connection) -> str:
    """First problem that SQLite finds in a database, in one line; empty if there is none. Raises one of FileErrors."""
    found: str = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    return "" if found == "ok" else found.splitlines()[-1]


def check_file(path: Path) -> None:
    """Raises CorruptStoreError for a file that is damaged, StoreError for one that is not ours or cannot be read."""
    if path.is_file() and is_empty(path):
        raise CorruptStoreError(f"{path} is damaged (it is empty): {ANOTHER_COPY}")
    with checking(path, ANOTHER_COPY) as connection:
        try:
            found = first_problem(connection)
        except FileErrors as error:
            of_the_disk = primary_code(error) == sqlite3.SQLITE_IOERR  # which says nothing of what is on it
            raise refusal(path, error, damaged=not of_the_disk, advice=ANOTHER_COPY) from error
    if found:
        raise CorruptStoreError(f"{path} is damaged ({found}): {ANOTHER_COPY}")


def is_empty(database: Path) -> bool:
    """True if there is no database yet; a writer's lock leaves a file without a byte."""
    return not database.exists() or database.stat().st_size == 0


def put_in_place(backup: Path, database: Path) -> None:
    """Make a checked copy the database, in one rename. Raises StoreError, also while a controller writes to it.

    The copy may have a WAL beside it. The lock's note of acknowledged commits stays: the controller's next start tells how
    many are missing.
    """
    database = Path(os.path.realpath(database))
    with unfinished(database) as copied:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(database)
        try:
            with contextlib.closing(connect_reader(backup, ANOTHER_COPY)) as source:
                fill(copied, source)
            move_wal_in(database)
            move_into_place(copied, database)
        finally:
            lock.release()


def move_wal_in(database: Path) -> None:
    """Move the WAL into the file, which is then whole without it."""
    with contextlib.suppress(*FileErrors), contextlib.ExitStack() as closing:  # a damaged one stays as it is
        old = sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True, timeout=5.0)
        closing.enter_context(contextlib.closing(old)).execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A temporary name, removed after the block. Raises StoreError if the target cannot be written."""
    name = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield name
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{target} cannot be written ({error}): choose another place or make room") from error
    finally:
        for leftover in (name, name.with_name(name.name + "-journal")):
            with contextlib.suppress(OSError):
                leftover.unlink()


def move_into_place(unfinished: Path, target: Path) -> None:
    """Rename a file once its content is on the disk, and wait for the name."""
    synchronise(unfinished)
    for beside in files_of(target)[1:]:  # of the old content: SQLite would play them into the new one
        beside.unlink(missing_ok=True)
    unfinished.replace(target)
    synchronise(target.parent)


def synchronise(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
