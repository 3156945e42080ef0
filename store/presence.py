"""Whether the database is still where it was: what is written into a file without a name is lost at the end."""

from __future__ import annotations

import os
from pathlib import Path

from store.connection import StoreError


class StoreGoneError(StoreError):
    """The files of the database were deleted or replaced while it was open. Nothing more can be promised."""


class Presence:
    """The files of an open database (the database, its WAL and the WAL's index), by device and inode."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identities = {name: identity for name in files_of(path) if (identity := identity_of(name)) is not None}

    def check(self) -> None:
        """Raises StoreGoneError where a name no longer leads to the file that is written to."""
        for name, identity in self._identities.items():
            now = identity_of(name)
            if now != identity:
                raise StoreGoneError(
                    f"{name} was {'deleted' if now is None else 'replaced'} while the controller was writing to it: "
                    "what has been acknowledged may be gone, nothing more is acknowledged; put the file back or restore "
                    "a backup, and start the controller again."
                )


def files_of(path: Path) -> tuple[Path, ...]:
    """A database and what SQLite keeps beside it while it is open."""
    return tuple(path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm"))


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
