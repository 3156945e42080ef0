"""A place for backups: a folder, or a URL that fsspec knows (s3://, gs://, sftp:// and so on with its package installed).

Names sort by time, `speclen-20261122T093000.250Z.db`, and are given to whole backups only.
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
from speclen.store.connection import DATABASE_BEGINS, CorruptStoreError, StoreError, connect_reader
from speclen.store.files import HEAD_OF_DATABASE, USER_VERSION, number

STAMP = "%Y%m%dT%H%M%S.%f"
NAME = re.compile(r"(?P<stem>.+)-(?P<stamp>\d{8}T\d{6}\.\d{3})Z\.db")


@dataclass(frozen=True, slots=True)
class Made:
    """One backup. commit: the number of the newest commit in it. warning: a sentence, once, where another is further."""

    name: str
    num_bytes: int
    commit: int
    warning: str = ""


class BackupPlace:
    """Backups of one database, by the stem of its name. Raises StoreError for a place that cannot be made.

    keep: number of backups kept, the newest. The backup with the most commits stays besides where the database has fewer:
    it was begun anew or put back.
    """

    def __init__(self, url: str, stem: str = "speclen", keep: int = 24) -> None:
        self.url, self._stem, self._keep = url, stem, keep
        with self._telling():
            self._fs, self._root = fsspec.core.url_to_fs(url)
            self._fs.makedirs(self._root, exist_ok=True)
        self._cleared = False
        self._commits: dict[str, int] = {}
        self._further = ""  # the backup of which a warning was told

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
        most, furthest = max(((held, each) for each, held in self.commits(names).items()), default=(0, ""))
        further = furthest if most > commit else ""
        with self._telling():
            for old in [*names, name][: -self._keep]:
                if old != further:
                    self._fs.rm_file(self._path(old))
        warning = ""
        if further not in ("", self._further):
            kept = f"{self.url.rstrip('/')}/{further}"
            warning = (
                f"{database} is at commit {commit} and {kept} at {most}, so the database was begun anew or put back: that "
                f"copy stays while it is further; to go on from it stop the controller and `speclen restore {kept} --db "
                f"{database} --overwrite`, else delete it"
            )
        self._further = further
        return Made(name, num_bytes, commit, warning)

    def add_if_changed(self, database: Path, last_commit: int) -> Made | None:
        """Add a backup unless the newest commit is the one that the last held. Raises StoreError."""
        if is_empty(database) or commit_of(database) == last_commit:
            return None
        return self.add(database)

    def commits(self, names: list[str]) -> dict[str, int]:
        """The number of the newest commit in each of these backups, as its head says; -1 where it is no database's."""
        known = {name: self._commits[name] for name in names if name in self._commits}
        unknown = [name for name in names if name not in known]
        with self._telling():
            heads = self._fs.cat_ranges([self._path(name) for name in unknown], 0, HEAD_OF_DATABASE, on_error="raise")
        self._commits = known | dict(zip(unknown, map(commit_in, heads), strict=True))
        return self._commits

    @contextlib.contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """A checked backup as a local file for the block. CorruptStoreError: damaged. StoreError: it cannot be fetched."""
        if isinstance(self._fs, LocalFileSystem):
            check_file(Path(self._path(name)))
            yield Path(self._path(name))
            return
        with folder_for_a_copy() as folder:
            local = folder / name
            advice = (
                f"try again when that is mended ({folder.parent} needs room, too), or restore an older copy by its name"
            )
            with self._telling(f"does not give {name}", advice):
                self._fs.get_file(self._path(name), str(local))
                if self._fs.size(self._path(name)) != local.stat().st_size:
                    raise OSError("it did not arrive whole")
            check_file(local)
            yield local

    @contextlib.contextmanager
    def _local(self, name: str) -> Iterator[Path]:
        """Path to write a backup to: in the place if that is a local folder, else uploaded after the block."""
        if isinstance(self._fs, LocalFileSystem):
            yield Path(self._path(name))
            return
        with folder_for_a_copy() as folder:
            local, unfinished = folder / name, self._path(f".{name}.part")
            yield local
            with self._telling():
                self._fs.put_file(str(local), unfinished)
                if self._fs.size(unfinished) != local.stat().st_size:
                    raise OSError(f"{name} did not arrive whole")
                self._fs.mv(unfinished, self._path(name))

    def _clear(self) -> None:
        """Remove unfinished files of a killed predecessor, before the first backup."""
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
        """Paths in the place. Object stores have no empty folders."""
        try:
            found: list[str] = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return found

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _telling(
        self,
        what: str = "cannot be used for backups",
        advice: str = "see that it can be reached, or name another place",
    ) -> Iterator[None]:
        """Turn any error of a file system into one sentence: what the place does, and the way out."""
        try:
            yield
        except StoreError:
            raise
        except ImportError as error:
            raise StoreError(f"{self.url} needs a package that is not installed ({error}): install it") from error
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise StoreError(f"{self.url} {what} ({reason}): {advice}") from error


def stamp(now: datetime, names: list[str]) -> str:
    """The time for a new name, UTC to the millisecond: later than all that are there, whatever the clock does."""
    text = now.strftime(STAMP)[:-3]
    newest = max((match["stamp"] for name in names if (match := NAME.fullmatch(name))), default="")
    if text <= newest:
        later = datetime.strptime(newest, STAMP) + timedelta(milliseconds=1)
        text = later.strftime(STAMP)[:-3]
    return text


@contextlib.contextmanager
def folder_for_a_copy() -> Iterator[Path]:
    """A temporary local folder. Raises StoreError if none can be made."""
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="speclen-"))
        except OSError as error:
            raise StoreError(f"there is no room for a copy ({error}): make some, or name a folder in TMPDIR") from error
        yield Path(folder)


def commit_in(head: bytes) -> int:
    """The number of the newest commit in a backup, which has no WAL, by its first bytes; -1 where it is no database's."""
    whole = len(head) == HEAD_OF_DATABASE and head.startswith(DATABASE_BEGINS)
    return number(head, USER_VERSION) if whole else -1


def commit_of(database: Path) -> int:
    """The number of the newest commit in a database. Raises StoreError."""
    connection = connect_reader(database)
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


def is_behind(database: Path, place: BackupPlace) -> bool:
    """True if the newest backup has commits that the database lacks. Raises StoreError."""
    newest = place.names()[-1:]
    return any(commit > commit_of(database) for commit in place.commits(newest).values())


def restore_newest(place: BackupPlace, database: Path, tell: Callable[[str], None], aside: str = "") -> str:
    """Make the newest sound backup the database; its name, empty if there is none. tell: gets a sentence per damaged one.

    aside: new name for a database that is replaced only if the backup has more commits. Raises StoreError if all are
    damaged, the newest cannot be fetched, or the database is in use.
    """
    names = place.names()
    for name in reversed(names):
        with contextlib.ExitStack() as opened:
            try:
                local = opened.enter_context(place.fetched(name))
            except CorruptStoreError as error:
                tell(f"{name} is left out: {error}")
                continue
            if aside and commit_of(local) <= commit_of(database):
                return ""
            put_in_place(local, database, aside)
            return name
    if names:
        raise StoreError(
            f"none of {len(names)} backups in {place.url} is sound: look at the place, or begin anew without"
        )
    return ""
