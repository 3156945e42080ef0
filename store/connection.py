"""Connections to the database file: one writer, guarded by a lock file, and any number of readers.

Importing this module is cheap; a controller that was killed comes back in a fraction of a second.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

try:
    import pysqlite3.dbapi2 as sqlite3
except ImportError:  # other systems than Linux: the SQLite that Python was built with
    import sqlite3

__all__ = [
    "APPLICATION_ID",
    "Connection",
    "CorruptStoreError",
    "StoreError",
    "WriterLock",
    "connect_reader",
    "connect_writer",
    "sqlite3",
]

# "spln" in ASCII: tells our files from other SQLite databases.
APPLICATION_ID = 0x73706C6E

# Before this version, several connections that write or checkpoint could corrupt a WAL file.
OLDEST_SAFE_SQLITE = (3, 51, 3)

# STRICT tables, upserts and -> operators; below this nothing here works.
OLDEST_USABLE_SQLITE = (3, 38, 0)

# Seconds that a new writer waits for the lock: a killed process may take a moment to go, a look takes an instant.
LOCK_PATIENCE_S = 0.3

# sqlite3.Connection of whichever module was found above.
Connection = Any


class StoreError(Exception):
    """The database cannot be used. One sentence that says why and what to do."""


class CorruptStoreError(StoreError):
    """The file is damaged, or is no database at all."""


class WriterLock:
    """Held by the one process that may write; the kernel releases it when the process dies, however it dies.

    A file of its own beside the database: locking the database through SQLite (locking_mode=EXCLUSIVE) would shut out
    readers, and a lock taken on the database file itself would be lost whenever SQLite closes a descriptor of it.
    Only meaningful on a local disk, like WAL itself.
    """

    def __init__(self, database: Path) -> None:
        self.path = lock_path(database)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not try_lock(self._descriptor, fcntl.LOCK_EX, LOCK_PATIENCE_S):
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise StoreError(
                f"{database} is in use by another controller (process {holder}): stop that one, or give this one "
                "another file with --db."
            )
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds all the same, only its holder stays unnamed

    def release(self) -> None:
        """Let another process write. The lock file stays: removing it would race with a process that just opened it."""
        os.close(self._descriptor)


def lock_path(database: Path) -> Path:
    return database.with_name(database.name + ".lock")


def try_lock(descriptor: int, kind: int, patience_s: float) -> bool:
    """Take a lock of a kind, LOCK_EX or LOCK_SH, within patience_s; False if somebody else keeps it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def is_locked(database: Path) -> bool:
    """True while some process may write to the database. Looks by sharing the lock for an instant."""
    try:
        descriptor = os.open(lock_path(database), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH, 0.0)
    finally:
        os.close(descriptor)


def connect_writer(path: Path) -> Connection:
    """The connection that writes: WAL, synchronous FULL, so that a commit survives a loss of power.

    Raises StoreError, for another program's database as well, or CorruptStoreError if the file is none. Such a file stays
    as it is.
    """
    if sqlite3.sqlite_version_info < OLDEST_USABLE_SQLITE:
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: install the pysqlite3 package.")
    try:
        connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        # Has to come before the first table; without it a file never gives space back. Setting it again would write.
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        elif connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            require_ours(path, connection)  # before the next line, which would change another program's file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    except sqlite3.DatabaseError as error:
        raise refusal(path, error) from error
    return connection


def connect_reader(path: str | os.PathLike[str]) -> Connection:
    """A read-only connection to a live or closed database. Raises StoreError if there is none or it is unreadable."""
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"There is no database at {path}: start a controller with --db {path}, or name another file.")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        require_ours(path, connection)
    except sqlite3.DatabaseError as error:
        raise refusal(path, error) from error
    connection.row_factory = sqlite3.Row
    return connection


def require_ours(path: Path, connection: Connection) -> None:
    """Raises StoreError unless the file is a speclen database."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise StoreError(f"{path} is an SQLite database, but not one of speclen's: name another file.")


def refusal(path: Path, error: Exception, damaged: bool = False) -> StoreError:
    """The sentence for an error of SQLite while opening a file. damaged: a check found so, whatever its code."""
    if damaged or is_corruption(error):
        return CorruptStoreError(
            f"{path} is damaged ({error}): restore a backup over it, or let the controller start anew with "
            "--move-corrupt-aside."
        )
    return StoreError(f"{path} cannot be opened ({error}): check the folder, its permissions and the free space.")


def is_corruption(error: Exception) -> bool:
    """True if SQLite says that the file's content is wrong, as opposed to the disk being full or busy."""
    return primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def primary_code(error: Exception) -> int:
    """SQLite's primary result code of an error; 0 if it carries none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
