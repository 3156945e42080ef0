"""A place for backups: a folder, or whatever fsspec reaches (s3://, gs://, sftp:// and so on with its package installed).

Every backup has a name of its own that sorts by time, `speclen-20261122T093000.250Z.db`, and gets it only when it is
whole. So the newest name is always a backup to go on from, whoever is killed when.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from speclen.store.backup import check_file, copy, is_empty, put_in_place
from speclen.store.connection import StoreError, connect_reader

STAMP = "%Y%m%dT%H%M%S.%f"
NAME = re.compile(r"(?P<stem>.+)-(?P<stamp>\d{8}T\d{6}\.\d{3})Z\.db")


@dataclass(frozen=True, slots=True)
class Made:
    """One backup. commit: the number of the newest commit in it."""

    name: str
    num_bytes: int
    commit: int


class BackupPlace:
    """Backups of one database, by the stem of its name. keep: how many are kept, the newest.

    Raises StoreError for a place that does not exist and cannot be made, or whose kind is unknown.
    """

    def __init__(self, url: str, stem: str = "speclen", keep: int = 24) -> None:
        self.url, self._stem, self._keep = url, stem, keep
        with self._telling():
            self._fs, self._root = fsspec.core.url_to_fs(url)
            self._fs.makedirs(self._root, exist_ok=True)
        self._cleared = False

    def names(self) -> list[str]:
        """Names of whole backups, oldest first."""
        with self._telling():
            # Others write here, too: what was listed before may be of another minute.
            self._fs.invalidate_cache()
            found = [path.rpartition("/")[2] for path in self._listed()]
        return sorted(name for name in found if (match := NAME.fullmatch(name)) and match["stem"] == self._stem)

    def add(self, database: Path, now: datetime | None = None) -> Made:
        """Copy a database, which may be in use, and let the oldest copies beyond the bound go. Raises StoreError."""
        self._clear()
        names = self.names()
        name = f"{self._stem}-{stamp(now or datetime.now(UTC), names)}Z.db"
        connection = connect_reader(database)
        try:
            with self._local(name) as target:
                num_bytes = copy(connection, target)
                commit = commit_of(target)
        finally:
            connection.close()
        with self._telling():
            for old in [*names, name][: -self._keep]:
                self._fs.rm_file(self._path(old))
        return Made(name, num_bytes, commit)

    def add_if_changed(self, database: Path, last_commit: int) -> int:
        """Add a backup unless the newest commit is the one that the last held; its number. Raises StoreError."""
        if is_empty(database) or commit_of(database) == last_commit:
            return last_commit
        return self.add(database).commit

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """A backup, checked, as a file of this machine for the block. Raises StoreError where it is damaged or gone."""
        with tempfile.TemporaryDirectory(prefix="speclen-") as folder:
            local = Path(folder) / name
            with self._telling():
                self._fs.get_file(self._path(name), str(local))
            check_file(local)
            yield local

    @contextlib.contextmanager
    def _local(self, name: str) -> Iterator[Path]:
        """Where to write a backup: in the place itself, if that is a folder here; else it is sent there afterwards."""
        if isinstance(self._fs, LocalFileSystem):
            yield Path(self._path(name))
            return
        with tempfile.TemporaryDirectory(prefix="speclen-") as folder:
            local, unfinished = Path(folder) / name, self._path(f".{name}.part")
            yield local
            with self._telling():
                self._fs.put_file(str(local), unfinished)
                if self._fs.size(unfinished) != local.stat().st_size:
                    raise OSError(f"{name} did not arrive whole")
                self._fs.mv(unfinished, self._path(name))

    def _clear(self) -> None:
        """Remove what a killed predecessor left unfinished: before the first backup, since only a maker leaves such."""
        if self._cleared:
            return
        begin = f".{self._stem}-"
        with self._telling():
            for path in self._listed():
                if path.rpartition("/")[2].startswith(begin):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm_file(path)
        self._cleared = True

    def _listed(self) -> list[str]:
        """Object stores have no folders: one that holds nothing is not there, whatever was made."""
        try:
            found: list[str] = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return found

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Whatever a file system raises, each its own kinds, becomes one sentence."""
        try:
            yield
        except StoreError:
            raise
        except ImportError as error:
            raise StoreError(f"{self.url} needs a package that is not installed ({error}): install it") from error
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise StoreError(
                f"{self.url} cannot be used for backups ({reason}): name another place with --to"
            ) from error


def stamp(now: datetime, names: list[str]) -> str:
    """The time for a new name, UTC to the millisecond: later than all that are there, whatever the clock does."""
    text = now.strftime(STAMP)[:-3]
    newest = max((match["stamp"] for name in names if (match := NAME.fullmatch(name))), default="")
    if text <= newest:
        later = datetime.strptime(newest, STAMP) + timedelta(milliseconds=1)
        text = later.strftime(STAMP)[:-3]
    return text


def commit_of(database: Path) -> int:
    """The number of the newest commit in a database. Raises StoreError."""
    connection = connect_reader(database)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


def restore_newest(place: BackupPlace, database: Path, tell: Callable[[str], None]) -> str:
    """Make the newest sound backup the database; its name, empty where there is none. tell: gets a sentence a damaged one.

    Raises StoreError where all are damaged, and for a database that is in use or cannot be written.
    """
    names = place.names()
    for name in reversed(names):
        with contextlib.ExitStack() as opened:
            try:
                local = opened.enter_context(place.fetched(name))
            except StoreError as error:
                tell(f"{name} is left out: {error}")
                continue
            put_in_place(local, database)
            return name
    if names:
        raise StoreError(
            f"none of {len(names)} backups in {place.url} is sound: look at the place, or begin anew without"
        )
    return ""
