"""A commit answered with None is on the disk, whole and once; every fault is one sentence."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

import speclen.store
from speclen.store.connection import (
    APPLICATION_ID,
    OLDEST_SAFE_SQLITE,
    Connection,
    CorruptStoreError,
    StoreError,
    connect_reader,
    connect_writer,
    sqlite3,
)
from speclen.store.database import Store, StoreConfig
from speclen.store.queries import stored_reports
from speclen.store.schema import Commit, StateRow, StoredState
from tests.support import store_rows
from tests.support.store_rows import (
    NOW,
    context,
    decision,
    estimate,
    moment,
    open_with_connection,
    report,
    rows,
    store_now,
    worker,
    written,
)
from tests.support.waiting import until

IMPATIENT = StoreConfig(first_retry_s=0.01, longest_retry_s=0.05)


def test_what_was_committed_is_there_after_reopening(tmp_path):
    late = worker(5, missing_ranges="[[2, 3]]", num_missing=2)
    commit = Commit(
        contexts=[context(), context(2, "gpu")],
        workers=[late],
        reports=[report(1, group_id=4), report(4, group_id=6, received_at=NOW + 0.25), report(5, group_id=5)],
        states=[StateRow(1, b"PK\0\xff", NOW), StateRow(2, b"2", NOW + 1)],
    )
    store = Store.open(written(tmp_path / "s.db", commit))
    assert store.load() == StoredState(
        contexts=(context(), context(2, "gpu")),
        workers=(late,),
        states={1: b"PK\0\xff", 2: b"2"},
        last_group_id=6,
        last_profile_id=0,
    )
    store.close()
    connection = connect_reader(tmp_path / "s.db")
    assert list(stored_reports(connection)) == list(commit.reports)
    connection.close()


def test_the_file_is_set_up_to_survive_a_loss_of_power_and_to_shrink(tmp_path):
    store, connection = open_with_connection(tmp_path / "s.db")
    pragma = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS}
    store.close()
    assert pragma == PRAGMAS
    assert sqlite3.sqlite_version_info >= OLDEST_SAFE_SQLITE or not sqlite3.__name__.startswith("pysqlite3")


PRAGMAS = {
    "journal_mode": "wal",
    "synchronous": 2,
    "foreign_keys": 1,
    "auto_vacuum": 2,
    "application_id": APPLICATION_ID,
}


def test_commits_are_answered_in_order_and_by_another_thread(store):
    answers: list[tuple[int, str]] = []
    for number in range(1, 201):
        store.submit(
            moment([number]), lambda error, number=number: answers.append((number, threading.current_thread().name))
        )
    store.close()
    assert answers == [(number, "store-writer") for number in range(1, 201)]
    assert rows(store.path, "SELECT seq FROM step_reports") == [(number,) for number in range(1, 201)]


def test_a_refusal_of_one_commit_does_not_hold_up_another(tmp_path):
    """Both wait for another program's lock, so they are of one transaction."""
    store, connection = open_with_connection(tmp_path / "s.db", IMPATIENT)
    assert store_now(store, Commit(contexts=[context(), context(2, device="other")])) is None
    connection.execute("PRAGMA busy_timeout = 20")
    outcomes: dict[str, Exception | None] = {}
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        bad = Commit(workers=[worker(2**64)], reports=[report(1)])
        store.submit(bad, lambda error: outcomes.update(bad=error))
        until(lambda: not store.health().ok)
        others = {"worker_key": 2, "context_id": 2}
        good = Commit(workers=[worker(5, **others)], reports=[report(5, **others)])
        store.submit(good, lambda error: outcomes.update(good=error))
        until(lambda: "; 2 reports wait" in store.health().detail)
        other.execute("ROLLBACK")
    until(lambda: len(outcomes) == 2)
    assert outcomes["good"] is None
    assert "refuses" in str(outcomes["bad"])
    assert rows(store.path, "SELECT worker_key, applied_seq FROM workers") == [(2, 5)]
    assert rows(store.path, "SELECT worker_key, seq FROM step_reports") == [(2, 5)]
    store.close()


@pytest.mark.parametrize("kind", ["the name itself", "symlink", "hard link"])
def test_a_second_writer_is_refused_under_any_name_until_the_first_is_gone(tmp_path, kind):
    path, other = tmp_path / "s.db", tmp_path / "elsewhere" / "other.db"
    first = Store.open(path)
    other.parent.mkdir()
    name = {"symlink": os.symlink, "hard link": os.link}.get(kind, lambda *names: None)
    name(path, other)
    second = other if other.exists() else path
    by = "under another name of the same file" if kind == "hard link" else f"process {os.getpid()}"
    with pytest.raises(StoreError, match=rf"in use by another controller \({by}\).*--db"):
        Store.open(second)
    assert store_now(first, moment([1])) is None
    first.close()
    with pytest.raises(StoreError, match="closed"):
        first.submit(moment([2]), lambda error: None)
    if kind == "hard link":  # its WAL lies next to one of the names
        with pytest.raises(StoreError, match="2 names"):
            Store.open(second)
    else:
        Store.open(second).close()


@pytest.mark.parametrize("damage", ["no database", "first page", "table page"])
def test_a_damaged_file_is_refused_and_moved_aside_only_on_request(tmp_path, damage):
    path = written(tmp_path / "s.db", moment(range(1, 2000), decisions=[decision(n, 2) for n in range(200)]))
    content = bytearray(path.read_bytes())
    if damage == "no database":
        content = bytearray(b"a letter to the editor\n" * 500)
    elif damage == "first page":
        content[100:4096] = b"\xff" * 3996
    else:
        content[-3 * 4096 :] = b"\x5a" * (3 * 4096)
    path.write_bytes(content)
    with pytest.raises(CorruptStoreError, match=r"s\.db is damaged .*backup.*--move-corrupt-aside"):
        Store.open(path)
    assert path.read_bytes() == content, "a refused file stays as it was"
    store = Store.open(path, move_corrupt_aside=True)
    assert store.load() == StoredState()
    store.close()
    [aside] = [file for file in tmp_path.glob("s.db.damaged-*") if not file.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes() == content


def test_the_learned_tables_of_a_large_file_are_checked(tmp_path):
    reasons = [decision(n, 2, reason="a marked reason" if n == 50 else "a test") for n in range(200)]
    path = written(tmp_path / "s.db", moment([1], decisions=reasons))
    content = bytearray(path.read_bytes())
    page = content.index(b"a marked reason") // 4096
    content[page * 4096 : page * 4096 + 2000] = b"\x5a" * 2000
    path.write_bytes(content)
    with pytest.raises(CorruptStoreError, match="is damaged"):
        Store.open(path, StoreConfig(checked_bytes=0))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"file/s\.db cannot be created .*--db"):
        Store.open(tmp_path / "file" / "s.db")
    with pytest.raises(StoreError, match=r"there is no database at .*missing\.db"):
        connect_reader(tmp_path / "missing.db")
    (tmp_path / "folder.db").mkdir()
    os.mkfifo(tmp_path / "pipe.db")
    for name in ("folder.db", "pipe.db"):
        with pytest.raises(StoreError, match=rf"{name} cannot be opened because it is a .*: name a file with --db"):
            Store.open(tmp_path / name)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"file", "folder.db", "pipe.db"}, "a lock was left next to a folder given as a file"


def fill_up(connection: Connection) -> None:
    """No page more than the file has: SQLite then fails as on a full disk, with SQLITE_FULL."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_reported_and_recovered_from(tmp_path):
    store, connection = open_with_connection(tmp_path / "s.db", IMPATIENT)
    store_now(store, moment([1], arm_estimates=[estimate()]))
    fill_up(connection)
    answers: list[Exception | None] = []
    for first in range(2, 5002, 500):
        store.submit(moment(range(first, first + 500)), answers.append)
        time.sleep(0.01)
    until(lambda: "5000 reports wait in memory" in store.health().detail)
    assert not store.health().ok
    assert "full" in store.health().detail
    assert answers == [], "nothing is durable, so nothing is answered"
    assert rows(store.path, "SELECT applied_seq FROM workers") == [(1,)], "a failed commit leaves no trace"
    connection.execute("PRAGMA max_page_count = 1000000")
    until(lambda: len(answers) == 10)
    assert answers == [None] * 10
    assert store.health().ok
    assert rows(store.path, "SELECT seq FROM step_reports") == [(seq,) for seq in range(1, 5002)]
    assert store.load().workers[0].applied_seq == 5001
    assert rows(store.path, "SELECT count(*) FROM store_events") == [(0,)]
    store.close()


def test_closing_on_a_full_disk_ends_in_time_and_says_what_was_lost(tmp_path):
    store, connection = open_with_connection(tmp_path / "s.db", IMPATIENT)
    store_now(store, moment([1]))
    fill_up(connection)
    answers: list[Exception | None] = []
    store.submit(moment(range(2, 2000)), answers.append)
    until(lambda: not store.health().ok)
    store.close(timeout_s=0.3)
    assert isinstance(answers[0], StoreError)
    assert "full" in str(answers[0])
    store = Store.open(store.path)
    assert store.load().workers[0].applied_seq == 1
    store.close()


SCHEMA = Path(speclen.store.__file__).with_name("schema.sql").read_text()


@pytest.mark.parametrize("opened", [Store.open, connect_reader, connect_writer])
@pytest.mark.parametrize(
    ("application_id", "words"),
    [
        (APPLICATION_ID - 1, "of another version of speclen: start a new one with --db"),
        (0x73706C6E, "of another version of speclen: start a new one with --db"),
        (0, "not one of speclen's: name another file"),
        (0x12345678, "not one of speclen's: name another file"),
    ],
)
def test_a_database_of_another_format_is_refused_and_unchanged(tmp_path, opened, application_id, words):
    path = tmp_path / "s.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE latency_cells (x)")
        connection.execute(f"PRAGMA application_id = {application_id}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=words):
        opened(path)
    assert path.read_bytes() == before


def test_a_new_file_has_the_schema_word_for_word(tmp_path):
    Store.open(tmp_path / "s.db").close()
    for (created,) in store_rows.rows(tmp_path / "s.db", "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"):
        assert f"{created};" in SCHEMA
