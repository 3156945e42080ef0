"""The database of one controller. One thread writes all commits in order, so that no caller waits for the disk.

Once a commit's callback has been called with None, its reports are never lost and never counted twice, even after a crash:
rows, estimates and high-water marks are in one transaction, which is on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from speclen.store import queries
from speclen.store.connection import (
    APPLICATION_ID,
    Connection,
    CorruptStoreError,
    FileErrors,
    StoreError,
    connect_reader,
    connect_writer,
    is_corruption,
    is_new,
    refusal,
    sqlite3,
)
from speclen.store.files import Presence, WriterLock, damage_path, move_aside, size_of
from speclen.store.retention import Retention, give_back_space
from speclen.store.schema import Commit, StoredState, StoreEventRow, StoreHealth
from speclen.store.transaction import EVENTS, Outcome, write

LOOK_INTERVAL_S = 0.5  # between checks of the files while nothing is written

# Advice for damage found while writing. The next start may miss it, because it skips the raw reports of a large file.
MOVE_AWAY = "restore a backup over it, or move it and its -wal away, and start the controller again."

# Tables that grow with the number of reports: not checked when a large file is opened.
LARGE_TABLES = ("step_reports", "prediction_windows")

WRITER_NICE = 10  # niceness of the writer's thread

log = logging.getLogger(__name__)

OnDone = Callable[[Exception | None], None]
Waiting = list[tuple[Commit, OnDone]]


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of the store.

    first_retry_s, longest_retry_s: pause between attempts while commits fail; it doubles from the first to the second.
    checked_bytes: files up to this size are checked completely when opened (0.2 s), larger ones without raw reports.
    """

    retention: Retention = field(default_factory=Retention)
    first_retry_s: float = 0.1
    longest_retry_s: float = 2.0
    checked_bytes: int = 16 * 2**20


class Store:
    """The only writer of a database file. Create it with `Store.open`; any thread may call `submit` and `health`."""

    def __init__(self, path: Path, connection: Connection, lock: WriterLock, config: StoreConfig) -> None:
        self.path = path
        self.config = config
        self._connection = connection
        self._lock_file = lock
        self._changed = threading.Condition()
        self._waiting: Waiting = []
        self._in_flight: Waiting = []
        self._ended: StoreError | None = None
        self._presence = Presence(path, lock.descriptor)
        self._commit_number = connection.execute("PRAGMA user_version").fetchone()[0]
        # Commits that the last writer acknowledged but that are missing from the file: see `WriterLock`.
        self.num_commits_missing = max(0, lock.num_commits - self._commit_number)
        if self.num_commits_missing:
            _note_missing(connection, self.num_commits_missing)
        lock.note(self._commit_number)
        # Retention uses a monotonic clock: a clock that jumps ahead must not make every report too old to keep.
        self._epoch = time.time() - time.monotonic()
        self._closing_at: float | None = None
        self._failure = ""
        self._num_refused = 0
        self._last_commit_s = 0.0
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], config: StoreConfig | None = None, move_corrupt_aside: bool = False
    ) -> Store:
        """Open or create a database and become its only writer.

        Raises StoreError if another process writes to the file (under any name), it has another version's schema, or it
        cannot be read; CorruptStoreError if it is damaged. move_corrupt_aside: rename a damaged file and create a new one.
        """
        path, config = Path(os.path.realpath(path)), config or StoreConfig()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be created ({error}): choose another place with --db.") from error
        checked_bytes = sys.maxsize if damage_path(path).exists() else config.checked_bytes
        try:
            try:
                connection = open_checked(path, checked_bytes)
            except CorruptStoreError:
                if not move_corrupt_aside:
                    raise
                move_aside(path)
                lock.take_file()
                connection = open_checked(path, config.checked_bytes)
            damage_path(path).unlink(missing_ok=True)
            return cls(path, connection, lock, config)
        except BaseException:
            lock.release()
            raise

    def load(self) -> StoredState:
        """Everything that a restarted controller needs, without reading raw reports."""
        with contextlib.closing(connect_reader(self.path)) as connection:
            return queries.load_state(connection)

    def submit(self, commit: Commit, on_done: OnDone) -> None:
        """Queue a commit after all earlier ones; never waits for the disk.

        The writer's thread calls on_done: with None once the commit is on disk, with ReportsRefusedError if some of its
        reports were left out, and with another error if the commit is malformed, the file is damaged or gone, or the store
        was closed first. While the disk is full, commits wait and are retried.
        """
        with self._changed:
            if self._closing_at is not None:
                raise StoreError("the store is closed")
            if self._ended is not None:
                raise self._ended
            self._waiting.append((commit, on_done))
            self._changed.notify()

    def health(self) -> StoreHealth:
        """Current state of the writer."""
        with self._changed:
            detail = "every commit is on disk"
            if self._failure:
                num_reports = sum(len(commit.reports) for commit, _ in [*self._in_flight, *self._waiting])
                detail = f"{self._failure}; {num_reports} reports wait in memory and will be retried"
            if self._ended is not None:
                detail = str(self._ended)
            return StoreHealth(
                ok=not self._failure and self._ended is None,
                detail=detail,
                num_rows_refused=self._num_refused,
                last_commit_s=self._last_commit_s,
                database_bytes=size_of(self.path),
                alive=self._ended is None,
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Write pending commits, for at most timeout_s if the disk refuses them, and release the database."""
        with self._changed:
            if self._closing_at is None:
                self._closing_at = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        """Write until closed. If writing ends with an error, `health` reports it, and pending callers receive it."""
        try:
            self._write()
            self._connection.close()
        except Exception as error:
            # The connection stays open: closing it would delete the WAL by name, which may belong to another file by now.
            self._end(error)
        finally:
            self._presence.close()
            self._lock_file.release()

    def _write(self) -> None:
        """Write all pending commits in one transaction and call back, until closed."""
        _lower_priority()
        while waiting := self._take():
            outcome = self._store([commit for commit, _ in waiting])
            for place, (_, on_done) in enumerate(waiting):
                _tell(on_done, outcome.errors.get(place))
            self._give_back_space()

    def _end(self, error: Exception) -> None:
        """Fail all pending commits and later ones."""
        with self._changed:
            self._ended = (
                error if isinstance(error, StoreError) else StoreError(f"the store's writer failed: {error!r}")
            )
            waiting, self._in_flight, self._waiting = [*self._in_flight, *self._waiting], [], []
        for _, on_done in waiting:
            _tell(on_done, self._ended)

    def _take(self) -> Waiting:
        """Wait for commits and return all pending ones; empty once closed. Raises StoreGoneError if the file disappears."""
        with self._changed:
            while not self._waiting and self._closing_at is None:
                self._changed.wait(LOOK_INTERVAL_S)
                self._presence.check(self._commit_number)
            self._in_flight, self._waiting = self._waiting, []
            return self._in_flight

    def _store(self, commits: Sequence[Commit]) -> Outcome:
        """Retry until the commits are stored or the store is closed. Raises StoreError if retrying cannot help."""
        delay = self.config.first_retry_s
        while True:
            started = time.perf_counter()
            try:
                outcome = self._commit(commits)
            except sqlite3.Error as error:
                self._refuse_damage(error)
                if not self._wait_to_retry(error, delay):
                    closed = StoreError(f"the store was closed before this could be stored ({error})")
                    return Outcome(dict.fromkeys(range(len(commits)), closed))
                delay = min(2 * delay, self.config.longest_retry_s)
            else:
                self._succeeded(outcome, time.perf_counter() - started)
                return outcome

    def _commit(self, commits: Sequence[Commit]) -> Outcome:
        """Write one transaction, and check before and after it that the files are still in place."""
        self._presence.check(self._commit_number)
        number = self._commit_number + 1
        now = min(self._epoch + time.monotonic(), time.time())
        outcome = write(self._connection, commits, self.config.retention, number, now)
        self._commit_number = number
        self._presence.check(number)
        self._lock_file.note(number)
        return outcome

    def _refuse_damage(self, error: Exception) -> None:
        """Raise CorruptStoreError if the file is damaged, or StoreGoneError if it was replaced."""
        if is_corruption(error):
            self._presence.check(self._commit_number)
            with contextlib.suppress(OSError):  # the damage itself is reported below
                damage_path(self.path).touch()
            raise refusal(self.path, error, advice=MOVE_AWAY) from error

    def _wait_to_retry(self, error: Exception, delay: float) -> bool:
        """Record the failure and wait; return False once it is time to stop."""
        with self._changed:
            self._failure = f"commits fail ({error})"
            if self._closing_at is not None:
                if time.monotonic() > self._closing_at:
                    return False
                delay = min(delay, 0.1)
            closing_at = self._closing_at
            self._changed.wait_for(lambda: self._closing_at != closing_at, delay)
        return True

    def _succeeded(self, outcome: Outcome, took_s: float) -> None:
        with self._changed:
            self._failure = str(next(iter(outcome.errors.values()), ""))
            self._num_refused += len(outcome.refusals)
            self._in_flight = []
            self._last_commit_s = took_s

    def _give_back_space(self) -> None:
        try:
            give_back_space(self._connection)
        except sqlite3.Error as error:  # nothing is lost; the next commit shows whether the problem persists
            self._refuse_damage(error)
            with self._changed:
                self._failure = f"commits fail ({error})"


def _tell(on_done: OnDone, error: Exception | None) -> None:
    """Call back. A failing callback must not end the writer."""
    try:
        on_done(error)
    except Exception:
        log.exception("a callback of a commit failed")


def open_checked(path: Path, checked_bytes: int) -> Connection:
    """Open a database for writing, create its tables if it is new, and check it. Raises StoreError."""
    connection = connect_writer(path)
    try:
        if is_new(connection):  # in one transaction, so that an interrupted start leaves an empty file
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


def _check_content(path: Path, connection: Connection, checked_bytes: int) -> None:
    """Check every table, or in a file above checked_bytes all but LARGE_TABLES. Raises CorruptStoreError."""
    small = path.stat().st_size <= checked_bytes
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for scope in ["1"] if small else [name for name in tables if name not in LARGE_TABLES]:
        found = connection.execute(f"PRAGMA quick_check({scope})").fetchone()[0]
        if found != "ok":
            raise refusal(path, sqlite3.DatabaseError(found.splitlines()[-1]), damaged=True)


def _note_missing(connection: Connection, num_commits: int) -> None:
    """Record acknowledged commits that are missing from the file: its WAL was cut, or a backup restored."""
    detail = "commits were acknowledged under this name and are not in the file"
    row = StoreEventRow("commits_missing", num_commits, detail, time.time())
    with contextlib.suppress(sqlite3.Error):  # a full disk is reported by opening the store
        EVENTS["store_events"].run(connection, [row])


def _lower_priority() -> None:
    """Lower the calling thread's priority, because no caller waits for it. Only Linux has priorities by thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
