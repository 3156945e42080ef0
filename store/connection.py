"""Connections to the database file: one writer and any number of readers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import pysqlite3.dbapi2 as sqlite3
except ImportError:  # not on Linux: use the SQLite that Python was built with
    import sqlite3

__all__ = ["sqlite3"]  # all modules import it from here

# "spl" and a digit in ASCII, which distinguishes our files from other SQLite databases. The digit is the version of
# schema.sql: raise it when a column, table or view changes.
APPLICATION_ID = 0x73706C38

# Before this version, several connections that write or checkpoint could corrupt a WAL file.
OLDEST_SAFE_SQLITE = (3, 51, 3)

MOST_SAID = 200  # characters of an error message that are quoted

# Advice for a damaged database, and for a damaged copy of one.
START_OVER = "restore a backup over it, or start the controller with --move-corrupt-aside to start with an empty one."
ANOTHER_COPY = "make another copy."

Connection = Any  # sqlite3.Connection of the module imported above

DATABASE_BEGINS = b"SQLite format 3\0"  # magic bytes of every SQLite file
# Errors that a damaged file can raise. SQLite quotes damaged names in its messages, and these may not be valid UTF-8.
FileErrors = (sqlite3.DatabaseError, UnicodeDecodeError)


class StoreError(Exception):
    """The database cannot be used. The message is one sentence that says why and what to do."""


class CorruptStoreError(StoreError):
    """The file is damaged, or is not a database."""


def connect_writer(path: Path) -> Connection:
    """Open the only connection that writes, with WAL and synchronous FULL, so that commits survive a loss of power.

    Raises CorruptStoreError, or StoreError, also for another program's database. Such a file is not changed.
    """
    try:
        connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        # Only takes effect before the first table exists. Without it the file never shrinks.
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        elif not is_new(connection):
            require_ours(path, connection)  # before the next line changes another program's file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 67108864")
    except FileErrors as error:
        raise refusal(path, error) from error
    return connection


def connect_reader(path: str | os.PathLike[str], advice: str = START_OVER) -> Connection:
    """A read-only connection to a database, in use or not. Raises StoreError. advice: for a damaged file.

    Without write permission to the file or its folder, a database that no program has open is read without locks.
    """
    path = Path(path)
    if not path.is_file():
        raise StoreError(
            f"there is no database at {path}: start one with `speclen up`, or name another file with --db."
        )
    try:
        connection = _opened(path)
        if is_new(connection):
            what = f"{path} has no tables, as after a first start that was interrupted"
            raise StoreError(f"{what}: start a controller on it, or delete it.")
        require_ours(path, connection)
    except FileErrors as error:
        raise refusal(path, error, advice=advice) from error
    connection.row_factory = sqlite3.Row
    return connection


def _opened(path: Path) -> Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=5.0)
    try:
        is_new(connection)
    except sqlite3.OperationalError as error:
        connection.close()
        if primary_code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or not os.access(
            path, os.R_OK
        ):
            raise
        return _opened_unlocked(path, uri)
    return connection


def _opened_unlocked(path: Path, uri: str) -> Connection:
    """Open a database without locks if no program has it open.

    In WAL mode SQLite needs a -shm file and cannot create one without write permission. If there is none, no program
    has the database open, and the file is complete unless a WAL was left behind.
    """
    companions = {suffix: Path(os.path.realpath(path) + suffix) for suffix in ("-wal", "-shm")}
    if size_or_zero(companions["-wal"]):
        raise StoreError(
            f"{path} cannot be read without write permission to its folder, because {companions['-wal'].name} holds its "
            "last commits and there is no -shm file: copy both files to a folder of your own, and name that copy."
        )
    return sqlite3.connect(f"{uri}&immutable=1", uri=True, factory=UnlockedConnection)


class UnlockedConnection(sqlite3.Connection):
    """A connection without locks. Closing it raises StoreError if a program opened the database meanwhile."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._name: str = self.execute("PRAGMA database_list").fetchone()[2]
        self._state = self._state_now()

    def _state_now(self) -> tuple[object, ...]:
        found = os.stat(self._name)
        return found.st_ino, found.st_size, found.st_mtime_ns, os.path.exists(self._name + "-shm")

    def close(self) -> None:
        super().close()
        if self._state_now() != self._state:
            raise StoreError(f"a controller opened {self._name} while it was read: try again.")


def size_or_zero(path: Path) -> int:
    """Size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def checking(path: Path, advice: str = START_OVER) -> Iterator[Connection]:
    """A connection for integrity checks that does not write. Raises StoreError as `connect_reader` does.

    SQLite skips CHECK constraints on read-only connections, so this one is writable but restricted to queries. A writable
    connection that is closed last would checkpoint and delete the WAL, so a reader stays open longer.
    """
    has_wal = os.path.exists(os.path.realpath(path) + "-wal")
    reader, examiner = connect_reader(path, advice), None
    if isinstance(reader, UnlockedConnection):
        with contextlib.closing(reader):
            yield reader
        return
    try:
        try:
            # mode=rw never creates the file, and falls back to read-only if the file is protected.
            examiner = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=5.0)
            examiner.execute("PRAGMA query_only = ON")
        except FileErrors as error:
            raise refusal(path, error, advice=advice) from error
        examiner.row_factory = sqlite3.Row
        yield examiner
    finally:
        for connection in (examiner, reader) if has_wal else (reader, examiner):
            if connection is not None:
                connection.close()


def is_new(connection: Connection) -> bool:
    """True if the file has no tables yet."""
    return bool(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0)


def require_ours(path: Path, connection: Connection) -> None:
    """Raise StoreError unless the file is a speclen database with this schema."""
    found = connection.execute("PRAGMA application_id").fetchone()[0]
    if found == APPLICATION_ID:
        return
    if found >> 8 == APPLICATION_ID >> 8:
        raise StoreError(f"{path} is a database of another version of speclen: start a new one with --db.")
    raise StoreError(f"{path} is an SQLite database, but not one of speclen's: name another file.")


def refusal(path: Path, error: Exception, damaged: bool = False, advice: str = START_OVER) -> StoreError:
    """StoreError for an SQLite error about a file. damaged: a check found damage. advice: for a damaged file."""
    said = in_one_line(error)
    if damaged or is_corruption(error):
        return CorruptStoreError(f"{path} is damaged ({said}): {advice}")
    return StoreError(f"{path} cannot be opened ({said}): check the folder, its permissions and the free space.")


def in_one_line(error: Exception) -> str:
    """SQLite's message as one printable line, since it may quote bytes of damaged files."""
    words = " ".join(str(error).split())
    return "".join(each if each.isprintable() else "?" for each in words)[:MOST_SAID]


# Messages about damaged content that come with a generic error code.
CORRUPT = ("Could not decode to UTF-8", "malformed database schema", "unsupported file format")


def is_corruption(error: Exception) -> bool:
    """True if the content of the file is damaged, as opposed to a full or busy disk."""
    if isinstance(error, UnicodeDecodeError) or str(error).startswith(CORRUPT):
        return True
    return primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def primary_code(error: Exception) -> int:
    """SQLite's primary result code of an error; 0 if it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
