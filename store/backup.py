"""Backups: consistent copies of a database, checked before they are renamed into place, and their restoration."""

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
    """Copy an open database to a file, replacing it, and return its size in bytes. Raises StoreError."""
    with unfinished(target) as copied:
        if is_locked(target):
            raise StoreError(in_use(target, "one that runs now"))
        fill(copied, source)
        num_bytes = copied.stat().st_size
        move_into_place(copied, target)
    return num_bytes


def fill(file: Path, source: Connection) -> None:
    """Copy an open database into a file. Raises StoreError if the source is damaged, sqlite3.Error if the disk is full."""
    try:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as copied:
            # In a single step: otherwise every commit of the controller would restart the copy.
            source.backup(copied)
            # A self-contained file, readable from read-only media without a -wal file.
            copied.execute("PRAGMA journal_mode = DELETE")
            found = first_problem(copied)
    except FileErrors as error:
        found = first_reading_problem(source)  # SQLite does not say which of the two files has the error
        if not found and isinstance(error, sqlite3.Error):
            raise
        found = found or in_one_line(error)
    if found:
        path = source.execute("PRAGMA database_list").fetchone()[2]
        raise StoreError(f"{path} cannot be copied ({found}): look at it with `speclen doctor`")


def first_reading_problem(source: Connection) -> str:
    """First problem of an open database or error while reading it, in one line; empty if there is none."""
    try:
        return first_problem(source)
    except FileErrors as error:
        return in_one_line(error)


def first_problem(connection: Connection) -> str:
    """First problem that SQLite finds in a database, in one line; empty if there is none. Raises one of FileErrors."""
    found: str = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    return "" if found == "ok" else found.splitlines()[-1]


def check_file(path: Path) -> None:
    """Raise CorruptStoreError if the file is damaged, StoreError if it is not ours or cannot be read."""
    if path.is_file() and is_empty(path):
        raise CorruptStoreError(f"{path} is damaged (it is empty): {ANOTHER_COPY}")
    with checking(path, ANOTHER_COPY) as connection:
        try:
            found = first_problem(connection)
        except FileErrors as error:
            of_the_disk = primary_code(error) == sqlite3.SQLITE_IOERR  # a read error, not damaged content
            raise refusal(path, error, damaged=not of_the_disk, advice=ANOTHER_COPY) from error
    if found:
        raise CorruptStoreError(f"{path} is damaged ({found}): {ANOTHER_COPY}")


def is_empty(database: Path) -> bool:
    """True if there is no database yet; taking the writer's lock creates an empty file."""
    return not database.exists() or database.stat().st_size == 0


def put_in_place(backup: Path, database: Path) -> None:
    """Replace the database by a checked copy in one rename. Raises StoreError, also if a controller has it open.

    The copy may have a WAL. The lock file keeps its number of acknowledged commits, so the controller's next start
    reports how many are missing.
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
    """Checkpoint the WAL into the file, so that the file is complete without it."""
    with contextlib.suppress(*FileErrors), contextlib.ExitStack() as closing:  # a damaged file is left as it is
        old = sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True, timeout=5.0)
        closing.enter_context(contextlib.closing(old)).execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A temporary name, removed after the block. Raises StoreError if the target cannot be written."""
    name = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield name
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{target} cannot be written ({error}): choose another place or free some space") from error
    finally:
        for leftover in (name, name.with_name(name.name + "-journal")):
            with contextlib.suppress(OSError):
                leftover.unlink()


def move_into_place(unfinished: Path, target: Path) -> None:
    """Rename a file after its content is on disk, and wait until the new name is, too."""
    synchronise(unfinished)
    for companion in files_of(target)[1:]:  # belong to the old content; SQLite would replay them into the new file
        companion.unlink(missing_ok=True)
    unfinished.replace(target)
    synchronise(target.parent)


def synchronise(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
