"""Faults of the file and the writer: nothing is acknowledged that is not durable, and every fault is reported."""

import contextlib
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speclen.store import database, transaction
from speclen.store.backup import copy
from speclen.store.connection import CorruptStoreError, StoreError, connect_reader, sqlite3
from speclen.store.database import Store, StoreConfig
from speclen.store.files import StoreGoneError, lock_path
from speclen.store.retention import Retention
from tests.support.store_rows import decision, moment, open_with_connection, rows, spoil_a_page, store_now, written
from tests.support.waiting import until


@pytest.mark.parametrize("program", ["import sqlite3", "from speclen.store.connection import sqlite3"])
def test_another_program_that_connects_leaves_the_wal(store, program):
    """SQLite deletes a WAL when the last connection is closed, which it tells by locks: ours have to stay."""
    path = store.path
    assert store_now(store, moment([1])) is None
    look = f"db = sqlite3.connect({str(path)!r}); print(*db.execute('SELECT seq FROM step_reports')); db.close()"
    for seq in (2, 3):
        seen = subprocess.run([sys.executable, "-c", f"{program}; {look}"], capture_output=True, text=True, check=True)
        assert seen.stdout.split() == [f"({number},)" for number in range(1, seq)]
        assert path.with_name("s.db-wal").exists()
        assert store_now(store, moment([seq])) is None
    assert rows(path, "SELECT seq FROM step_reports") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_deleted_file_is_noticed_and_nothing_more_is_acknowledged(store, suffix, replaced):
    assert store_now(store, moment([1])) is None
    victim = store.path.with_name(store.path.name + suffix)
    victim.unlink()
    if replaced:
        victim.write_bytes(b"")
    error = None
    try:
        error = store_now(store, moment([2]))
    except StoreGoneError as told_at_once:
        error = told_at_once
    assert isinstance(error, StoreGoneError)
    assert ("replaced" if replaced else "deleted") in str(error)
    health = store.health()
    assert not health.ok
    assert not health.alive
    with pytest.raises(StoreGoneError):
        store.submit(moment([3]), lambda error: None)


def test_a_file_deleted_between_commit_and_answer_is_not_acknowledged(store, monkeypatch):
    monkeypatch.setattr(database, "write", lambda *arguments: (transaction.write(*arguments), store.path.unlink())[0])
    assert isinstance(store_now(store, moment([1])), StoreGoneError)


def test_damage_found_while_writing_ends_the_writer(tmp_path):
    """Story: it was mistaken for a full disk and retried without end, and nothing was acknowledged."""
    path = tmp_path / "s.db"
    store, connection = open_with_connection(path)
    assert store_now(store, moment([1])) is None
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    spoil_a_page(path)
    connection.execute("PRAGMA shrink_memory")  # what it had read of the file is read again
    error = store_now(store, moment([2]))
    assert isinstance(error, CorruptStoreError)
    assert re.search(r"s\.db is damaged \(.*\): restore a backup over it, or move it .* away", str(error))
    assert not store.health().alive
    assert store.health().detail == str(error)
    with pytest.raises(CorruptStoreError):
        store.submit(moment([3]), lambda error: None)
    store.close()


def test_a_writer_that_dies_answers_all_waiting_commits(store, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no memory for a commit")

    monkeypatch.setattr("speclen.store.database.write", fail)
    assert "no memory" in str(store_now(store, moment([1])))
    until(lambda: not store.health().alive)
    with pytest.raises(StoreError, match="no memory"):
        store.submit(moment([2]), lambda error: None)


def copied(path: Path, folder: Path) -> Path:
    """The files as they are, which is how a crash would leave them."""
    folder.mkdir()
    for name in (path, path.with_name(path.name + "-wal"), lock_path(path)):
        if name.exists():
            shutil.copy(name, folder / name.name)
    return folder / path.name


def test_a_wal_cut_short_is_noticed_at_start(tmp_path, store):
    path, num_commits = store.path, 60  # so that half of the WAL is more than the schema
    for seq in range(1, num_commits + 1):
        assert store_now(store, moment([seq])) is None
    cut = copied(path, tmp_path / "copy")
    cut_in_half(cut.with_name("s.db-wal"))
    store.close()
    assert Store.open(path).num_commits_missing == 0
    after = Store.open(cut)
    left = rows(cut, "SELECT count(*) FROM step_reports")[0][0]
    assert 0 < left < num_commits
    assert after.num_commits_missing == num_commits - left
    assert rows(cut, "SELECT kind, num_rows FROM store_events") == [("commits_missing", num_commits - left)]
    after.close()
    again = Store.open(cut)
    assert again.num_commits_missing == 0, "reported once"
    again.close()


def cut_in_half(path: Path, backup: Path | None = None) -> None:
    os.truncate(path, path.stat().st_size // 2)


def copied_over(path: Path, backup: Path) -> None:
    """Do as `cp backup path`: the same inode with another content."""
    with path.open("r+b") as target:
        target.truncate(0)
        target.write(backup.read_bytes())


def copied_into(path: Path, backup: Path) -> None:
    """The same without a moment in which the file is empty, and with a size that does not shrink."""
    content = backup.read_bytes()
    with path.open("r+b") as target:
        target.write(content)
        target.write(bytes(max(0, path.stat().st_size - len(content))))


def emptied(path: Path, backup: Path) -> None:
    os.truncate(path, 0)


# A database that is copied over a WAL is none: SQLite reads that as an empty one.
OVER_THE_FILE, OVER_THE_WAL = (cut_in_half, emptied, copied_over, copied_into), (cut_in_half, emptied)


@pytest.mark.parametrize(
    ("suffix", "harm"), [*(("", harm) for harm in OVER_THE_FILE), *(("-wal", harm) for harm in OVER_THE_WAL)]
)
def test_a_file_that_is_written_over_in_place_is_noticed(tmp_path, suffix, harm):
    """Story: the inode stays the same, so reports that nobody could read again were still acknowledged."""
    path, backup = tmp_path / "s.db", tmp_path / "backup.db"
    store, connection = open_with_connection(path)
    connection.execute("PRAGMA wal_autocheckpoint = 20")
    for first in (1, 1001, 2001):
        assert store_now(store, moment(range(first, first + 1000))) is None
        if first == 1:
            with contextlib.closing(connect_reader(path)) as reader:
                copy(reader, backup)
    assert path.stat().st_size > 100_000, "there were checkpoints since"
    assert store_now(store, moment([3001])) is None  # and there is something in the WAL
    assert store.health().alive
    harm(path.with_name(path.name + suffix), backup)
    until(lambda: not store.health().alive)
    assert "cut short" in store.health().detail or "written over" in store.health().detail
    with pytest.raises(StoreGoneError):
        store.submit(moment([99_999]), lambda error: None)
    store.close()


def test_ordinary_writes_are_never_mistaken_for_a_replaced_file(tmp_path):
    """A false alarm would end a controller whose file is sound."""
    path = tmp_path / "s.db"
    store, connection = open_with_connection(path, StoreConfig(retention=Retention(max_report_rows=3000)))
    connection.execute("PRAGMA wal_autocheckpoint = 20")
    for number in range(24):
        assert store_now(store, moment(range(1 + 1000 * number, 1001 + 1000 * number))) is None
        if number % 4 == 1:  # a reader holds checkpoints up for a while, and another program adds an index
            reader = connect_reader(path)
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM step_reports").fetchone()
        elif number % 4 == 3:
            reader.close()
        if number == 12:
            other = sqlite3.connect(path)
            other.execute("CREATE INDEX other ON step_reports (seq)")
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            other.close()
    assert store.health().ok
    store.close()
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


def test_running_out_of_files_is_not_mistaken_for_a_lost_wal(store):
    """Story: with a thousand connections no file could be opened, and the controller took its WAL for a cut one."""
    assert store_now(store, moment([1])) is None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert store_now(store, moment([2])) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.health().alive


def test_a_wal_truncated_during_a_commit_is_noticed(store, monkeypatch):
    """Later commits lie behind the cut, so the file is no shorter than before."""
    assert store_now(store, moment(range(1, 2000))) is None
    wal = store.path.with_name("s.db-wal")
    monkeypatch.setattr(transaction, "_insert_profiles", lambda *_: os.truncate(wal, wal.stat().st_size // 2) or [])
    error = store_now(store, moment(range(2000, 2100)))
    assert "cut short" in str(error)


@pytest.mark.parametrize("what", ["schema", "column", "line end"])
def test_damage_that_is_not_utf8_is_reported_and_can_be_moved_aside(tmp_path, what):
    """SQLite quotes what is damaged. Where that was no UTF-8, the sentence was Python's, and nothing started any more;
    where it was the rest of a script, the sentence had many lines."""
    path = written(tmp_path / "s.db", moment([1]))
    content = path.read_bytes()
    old = b"cpu:test" if what == "column" else b"CREATE TABLE workers ("
    assert old in content
    new = {
        "schema": b"CREATE TAB\xed\xff workers (",
        "column": b"cpu:\xed\xff\xed\xff",
        "line end": b"CREATE '\n\x02E workers (",
    }[what]
    path.write_bytes(content.replace(old, new.ljust(len(old))))
    with pytest.raises(CorruptStoreError, match=r"is damaged .*--move-corrupt-aside") as refused:
        Store.open(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < len(str(path)) + 400
    store = Store.open(path, move_corrupt_aside=True)
    assert store_now(store, moment([1])) is None
    store.close()


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_random_damage_is_reported_or_harmless_and_can_be_moved_aside(tmp_path, store, suffix):
    """Written over the database or its WAL, or their end cut off: what is opened is sound."""
    dice, opened = random.Random(suffix), 0
    assert store_now(store, moment(range(1, 500), decisions=[decision(n, 2) for n in range(100)])) is None
    if not suffix:  # all of it is in the database
        store.close()
    for number in range(40):
        path = copied(store.path, tmp_path / str(number))
        victim = path.with_name(path.name + suffix)
        if number % 4:
            content = bytearray(victim.read_bytes())
            for _ in range(dice.randint(1, 40)):
                at, noise = dice.randrange(len(content)), dice.randbytes(dice.randint(1, 600))
                content[at : at + len(noise)] = noise
            victim.write_bytes(content)
        else:
            os.truncate(victim, dice.randrange(victim.stat().st_size))
        refusal = ""
        try:
            Store.open(path).close()
        except StoreError as error:
            refusal = str(error)
        assert not refusal or refusal.isprintable()
        opened += not refusal
        Store.open(path, move_corrupt_aside=True).close()
        assert rows(path, "PRAGMA quick_check") == [("ok",)]
    assert (opened == 40) == (suffix == "-wal"), "what is left of a WAL is whole commits"
