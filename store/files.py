"""The files of a database: the writer's lock, and checks that the files are still in place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from speclen.store.connection import StoreError, refusal, size_or_zero

LOCK_PATIENCE_S = 0.3  # a new writer waits this long for the lock, because a killed process may still be exiting


def damage_path(database: Path) -> Path:
    """Marker file for damage found while writing: the next start then checks the whole file, raw reports included."""
    return database.with_name(database.name + "-damaged")


class WriterLock:
    """Lock of the only process that may write; the kernel releases it when the process dies.

    There are two locks: one on a file next to the database, which also holds the process id and the number of acknowledged
    commits, and one on the database itself, for its other names (hard links). SQLite's locking_mode=EXCLUSIVE would
    exclude readers. Like WAL, this works only on a local disk.

    num_commits: commits that the last writer acknowledged; 0 if unknown.
    """

    def __init__(self, database: Path) -> None:
        if database.is_dir():  # checked before any file is created next to it
            example = database / "speclen.db"
            raise StoreError(
                f"{database} cannot be opened because it is a folder: name a file with --db, as {example}."
            )
        if database.exists() and not database.is_file():
            raise StoreError(f"{database} cannot be opened because it is a device or pipe: name a file with --db.")
        self.database = database
        self._note = os.open(lock_path(database), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._file = -1
        try:
            content = os.pread(self._note, 64, 0).decode(errors="replace").split()
            if not try_lock(self._note, fcntl.LOCK_EX, LOCK_PATIENCE_S):
                raise StoreError(in_use(database, f"process {content[0] if content else 'unknown'}"))
            self.num_commits = int(content[1]) if len(content) > 1 and content[1].isdecimal() else 0
            self.take_file()
            self.note(self.num_commits)
        except BaseException:
            self.release()
            raise

    def take_file(self) -> None:
        """Create the database file if needed and lock it; called again after a file was moved aside. Raises StoreError."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        try:
            self._file = os.open(self.database, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise refusal(self.database, error) from error
        if not try_lock(self._file, fcntl.LOCK_EX, LOCK_PATIENCE_S):
            raise StoreError(in_use(self.database, "under another name of the same file"))
        names = os.fstat(self._file).st_nlink
        if names > 1:
            raise StoreError(
                f"{self.database} has {names} names (hard links), but its -wal file exists next to only one of them: "
                "remove the others, or copy the file instead of linking it."
            )

    @property
    def descriptor(self) -> int:
        """Descriptor of the database file, open until the lock is released."""
        return self._file

    def note(self, num_commits: int) -> None:
        """Record the process id and the number of durable commits. Not synced: after a power loss it may be too low."""
        with contextlib.suppress(OSError):  # on a full disk the lock still holds
            text = f"{os.getpid()}\n{num_commits}\n".encode()
            os.pwrite(self._note, text.ljust(32), 0)

    def release(self) -> None:
        """Let another process write. The lock file stays, because removing it would race with a process that opens it."""
        for descriptor in (self._file, self._note):
            if descriptor >= 0:
                os.close(descriptor)


def in_use(database: Path, by: str) -> str:
    return f"{database} is in use by another controller ({by}): stop that one, or give this one another file with --db."


def lock_path(database: Path) -> Path:
    """The lock file, next to the file that symbolic links lead to."""
    real = Path(os.path.realpath(database))
    return real.with_name(real.name + ".lock")


def try_lock(descriptor: int, kind: int, patience_s: float) -> bool:
    """Take a lock, LOCK_EX or LOCK_SH, within patience_s; False if another process holds it."""
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
    """True while a process may write to the database. Tested by taking its locks in shared mode for an instant."""
    return _is_held(lock_path(database)) or _is_held(database)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH, 0.0)
    finally:
        os.close(descriptor)


class StoreGoneError(StoreError):
    """Files of the database were deleted or replaced while it was open. Nothing more is acknowledged."""


class Presence:
    """Checks that the files of an open database (database, WAL and WAL index) are still the same.

    Files are compared by device and inode, and by their first bytes, which reveal a file overwritten in place, as by `cp`.

    database: descriptor of the database file, which must stay open. It is not opened here, because closing a file releases
    all POSIX locks of the process on it, SQLite's included, and the next program to close it would delete the WAL.
    """

    def __init__(self, path: Path, database: int) -> None:
        self.path = path
        self._database = database
        self._identities = {name: identity for name in files_of(path) if (identity := identity_of(name)) is not None}
        # Kept open, because a process that has run out of descriptors could not open it later. SQLite does not lock it.
        self._wal_file = os.open(files_of(path)[1], os.O_RDONLY | os.O_CLOEXEC)
        self._file = Head.of(database, HEAD_OF_DATABASE)
        self._wal = Head.of(self._wal_file, HEAD_OF_WAL)

    def close(self) -> None:
        os.close(self._wal_file)

    def check(self, num_commits: int) -> None:
        """Raise StoreGoneError if a file was replaced, truncated or overwritten. num_commits: `PRAGMA user_version`."""
        for name, identity in self._identities.items():
            now = identity_of(name)
            if now != identity:
                raise gone(name, "deleted" if now is None else "replaced")
        file, wal = Head.of(self._database, HEAD_OF_DATABASE), Head.of(self._wal_file, HEAD_OF_WAL)
        if file.is_cut(self._file):
            raise gone(self.path, "cut short")
        if file.content != self._file.content and not file.follows(self._file, num_commits):
            raise gone(self.path, "written over")
        moved = wal.size == 0 and number(file.content, USER_VERSION) == num_commits  # PRAGMA wal_checkpoint(TRUNCATE)
        if wal.full < wal.size or (wal.is_cut(self._wal) and not moved):
            raise gone(files_of(self.path)[1], "cut short")
        self._file, self._wal = file, wal


def gone(name: Path, what: str) -> StoreGoneError:
    return StoreGoneError(
        f"{name} was {what} while the controller was writing to it, and acknowledged reports may be lost: put it back "
        "or restore a backup, and start the controller again."
    )


# Bytes of SQLite's header of a database, and of a WAL, whose salt changes whenever the WAL is restarted.
HEAD_OF_DATABASE, HEAD_OF_WAL = 100, 32
# Big-endian numbers in the database's header. FORM: the page size, and whether it is in WAL mode.
FORM, CHANGE_COUNTER, USER_VERSION = slice(16, 24), slice(24, 28), slice(60, 64)


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a file, and its size. In WAL mode only checkpoints change the database's header.

    full: offset of the first hole. A WAL is written without gaps; one that was truncated during a commit has a hole.
    """

    content: bytes
    size: int
    full: int

    @classmethod
    def of(cls, descriptor: int, num_bytes: int) -> Head:
        try:
            content, size = os.pread(descriptor, num_bytes, 0), os.fstat(descriptor).st_size
            return cls(content, size, os.lseek(descriptor, 0, os.SEEK_HOLE) if size else 0)
        except OSError:
            return cls(b"", 0, 0)

    def is_cut(self, before: Head) -> bool:
        """True if the file was truncated: SQLite itself shortens a file only when it also changes the header."""
        return self.size < before.size and self.content[: self.size] == before.content[: self.size]

    def follows(self, before: Head, num_commits: int) -> bool:
        """True if a checkpoint can have written this header: still in WAL mode, neither older nor newer than the commits."""
        old, new = before.content, self.content
        if len(new) < HEAD_OF_DATABASE or old[FORM] != new[FORM]:
            return False
        in_order = number(old, CHANGE_COUNTER) <= number(new, CHANGE_COUNTER)
        return in_order and number(old, USER_VERSION) <= number(new, USER_VERSION) <= num_commits


def number(head: bytes, place: slice) -> int:
    return int.from_bytes(head[place], "big")


def files_of(path: Path) -> tuple[Path, ...]:
    """A database, its WAL and the WAL's index."""
    return tuple(path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm"))


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def move_aside(path: Path) -> Path:
    """Rename a damaged database and its WAL to NAME.damaged-TIME, and return the new name."""
    target = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}")
    for source, renamed in zip(files_of(path), files_of(target), strict=True):
        if source.exists():
            source.rename(renamed)
    return target


def size_of(path: Path) -> int:
    """Size of the database and its WAL in bytes."""
    return sum(map(size_or_zero, files_of(path)[:2]))
