"""A database that is opened: checked, brought up to date, or moved aside."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from speclen.store import queries, statements
from speclen.store.connection import (
    Connection,
    FileErrors,
    connect_writer,
    refusal,
    sqlite3,
)
from speclen.store.records import StoreEventRow
from speclen.store.schema.migrations import migrate

# Tables that grow with the number of reports.
LARGE_TABLES = ("step_reports", "prediction_windows")

# Niceness of the writer's thread.
WRITER_NICE = 10


def open_checked(path: Path, checked_bytes: int) -> Connection:
    """A connection for writing to a file that was looked at. Raises StoreError."""
    connection = connect_writer(path)
    try:
        migrate(path, connection)
        _check_content(path, connection, checked_bytes)
        queries.load_state(connection)
    except FileErrors as error:
        connection.close()
        raise refusal(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def note_missing(connection: Connection, num_commits: int) -> None:
    """Leave a trace of commits that were told durable and are gone: a WAL cut short, or a backup put back."""
    detail = "commits were told durable under this name and are not in the file"
    row = StoreEventRow("commits_missing", num_commits, detail, time.time())
    with contextlib.suppress(sqlite3.Error):  # a full disk: whoever opens the store tells of it all the same
        statements.STORE_EVENTS.run(connection, [statements.STORE_EVENTS.as_values(row)])


def _check_content(path: Path, connection: Connection, checked_bytes: int) -> None:
    """Look at every table, in a large file at all but those that make it large. Raises CorruptStoreError."""
    small = path.stat().st_size <= checked_bytes
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for scope in ["1"] if small else [name for name in tables if name not in LARGE_TABLES]:
        found = connection.execute(f"PRAGMA quick_check({scope})").fetchone()[0]
        if found != "ok":
            raise refusal(path, sqlite3.DatabaseError(found.splitlines()[-1]), damaged=True)


def give_way() -> None:
    """Let the other threads of this process go first where cores are scarce: they answer, this one is waited for by none.

    Only Linux has priorities of single threads.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
