"""A database that is opened for writing: made if it is new, and checked."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from speclen.store import queries, statements
from speclen.store.connection import APPLICATION_ID, Connection, FileErrors, connect_writer, is_new, refusal, sqlite3
from speclen.store.records import StoreEventRow

# Tables that grow with the number of reports.
LARGE_TABLES = ("step_reports", "prediction_windows")

# Niceness of the writer's thread.
WRITER_NICE = 10


def open_checked(path: Path, checked_bytes: int) -> Connection:
    """A connection for writing to a checked file, made if it is new. Raises StoreError."""
    connection = connect_writer(path)
    try:
        if is_new(connection):  # In one transaction: a start that is cut off leaves an empty file.
            schema = Path(__file__).with_name("schema.sql").read_text("utf-8")
            connection.executescript(f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID}; {schema}; COMMIT")
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
    """Leave a trace of acknowledged commits that are gone: a WAL cut short, or a backup put back."""
    detail = "commits were acknowledged under this name and are not in the file"
    row = StoreEventRow("commits_missing", num_commits, detail, time.time())
    with contextlib.suppress(sqlite3.Error):  # a full disk: opening the store reports it anyway
        statements.EVENTS["store_events"].run(connection, [row])


def _check_content(path: Path, connection: Connection, checked_bytes: int) -> None:
    """Check every table, in a large file all but LARGE_TABLES. Raises CorruptStoreError."""
    small = path.stat().st_size <= checked_bytes
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for scope in ["1"] if small else [name for name in tables if name not in LARGE_TABLES]:
        found = connection.execute(f"PRAGMA quick_check({scope})").fetchone()[0]
        if found != "ok":
            raise refusal(path, sqlite3.DatabaseError(found.splitlines()[-1]), damaged=True)


def give_way() -> None:
    """Lower the calling thread's priority, since no caller waits for it. Only Linux has priorities of single threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
