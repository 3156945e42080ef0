"""A copy of a database: of one moment, whole, checked, and under its name only then. And back again."""

from __future__ import annotations

import os
from pathlib import Path

from speclen.store.connection import Connection, FileErrors, StoreError, connect_reader, refusal, sqlite3
from speclen.store.files import WriterLock, files_of


def copy(source: Connection, target: Path) -> int:
    """Copy an open database to a file, which is replaced if there is one; returns its size in bytes. Raises StoreError."""
    unfinished = unfinished_name(target)
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
        move_into_place(unfinished, target)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{target} cannot be written ({error}): choose another place or make room") from error
    finally:
        for leftover in (unfinished, unfinished.with_name(unfinished.name + "-journal")):
            leftover.unlink(missing_ok=True)
    return num_bytes


def check(connection: Connection) -> None:
    """Raises StoreError where SQLite finds anything wrong."""
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise StoreError(f"the copy is damaged ({found}), so the database is, too: see `speclen doctor`")


def check_file(path: Path) -> None:
    """Raises StoreError for a file that is no sound database of ours."""
    connection = connect_reader(path)
    try:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except FileErrors as error:
        raise refusal(path, error, damaged=True) from error
    finally:
        connection.close()
    if found != "ok":
        raise StoreError(f"{path} is damaged ({found}): take another copy")


def is_empty(database: Path) -> bool:
    """Whether there is no database yet; a file without a byte is what a writer's lock leaves."""
    return not database.exists() or database.stat().st_size == 0


def put_in_place(backup: Path, database: Path) -> None:
    """Make a checked copy the database, in one rename. Raises StoreError, also while a controller writes to it.

    The copy may be any database, with a WAL beside it, as a controller leaves it that was killed; a link stays one.
    The lock's note of how many commits were told durable stays: the controller's next start says how many are missing.
    """
    database = Path(os.path.realpath(database))
    unfinished = unfinished_name(database)
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(database)
        try:
            source = connect_reader(backup)
            try:
                copy(source, unfinished)
            finally:
                source.close()
            for beside in files_of(database)[1:]:  # of the old content: SQLite would play them into the new one
                beside.unlink(missing_ok=True)
            move_into_place(unfinished, database)
        finally:
            lock.release()
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{database} cannot be written ({error}): choose another place or make room") from error


def unfinished_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def move_into_place(unfinished: Path, target: Path) -> None:
    """Give a file its name when its content is on the disk, and wait until the name is."""
    synchronise(unfinished)
    unfinished.replace(target)
    synchronise(target.parent)


def synchronise(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
