"""A backup is a consistent snapshot that can be restored; a backup or restore that fails changes nothing."""

import shutil
import threading

import pytest

from speclen.cli.backup import backup, restore
from speclen.cli.support.output import UserError
from speclen.store.database import Store
from tests.support.database_rows import write_database, write_killed_database
from tests.support.store_rows import moment, report, rows, spoil_a_page, spoil_a_value, store_now


def test_a_backup_taken_while_the_controller_writes_is_a_consistent_snapshot(tmp_path):
    store = Store.open(tmp_path / "s.db")
    store_now(store, moment(range(1, 5001)))
    stop = threading.Event()

    def keep_writing() -> None:
        seq = 5000
        while not stop.is_set():
            seq += 10
            reports = [report(n) for n in range(seq - 9, seq + 1)]
            assert store_now(store, moment([seq], reports=reports)) is None

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for number in range(5):
            copy = tmp_path / f"copy-{number}.db"
            backup(copy, tmp_path / "s.db", overwrite=False)
            [(applied, stored, highest)] = rows(
                copy,
                "SELECT applied_seq, (SELECT count(*) FROM step_reports), (SELECT max(seq) FROM step_reports) FROM workers",
            )
            assert applied == stored == highest >= 5000
            assert rows(copy, "PRAGMA integrity_check") == [("ok",)]
    finally:
        stop.set()
        writer.join()
    store.close()
    assert sorted(path.name for path in tmp_path.glob("*copy*")) == [f"copy-{number}.db" for number in range(5)]


def test_an_existing_file_is_replaced_only_with_overwrite(tmp_path):
    original, copy = write_database(tmp_path / "s.db"), tmp_path / "copy.db"
    copy.write_text("precious")
    with pytest.raises(UserError, match="--overwrite"):
        backup(copy, original, overwrite=False)
    assert copy.read_text() == "precious"
    write_killed_database(tmp_path / "killed.db")  # its WAL would be played into the copy
    for target in (copy, tmp_path / "killed.db"):
        backup(target, original, overwrite=True)
        assert rows(target, "SELECT count(*) FROM step_reports") == [(3,)]


def test_a_backup_onto_the_database_itself_is_refused(tmp_path):
    """So is one onto a link to it: a rename would replace the file that the controller writes to."""
    database = write_database(tmp_path / "s.db")
    (tmp_path / "link.db").symlink_to(database)
    before = database.stat().st_ino
    for target in (database, tmp_path / "link.db"):
        with pytest.raises(UserError, match="is the database itself"):
            backup(target, database, overwrite=True)
    assert database.stat().st_ino == before


@pytest.mark.parametrize("harm", [spoil_a_value, spoil_a_page])
def test_an_unreadable_database_is_named_and_not_the_destination(tmp_path, harm):
    """Story: the error named the destination, so users looked at the wrong disk."""
    database, copy = write_database(tmp_path / "s.db"), tmp_path / "copy.db"
    harm(database)
    with pytest.raises(UserError, match=r"s\.db cannot be copied \(.*\): look at it with `speclen doctor`") as refused:
        backup(copy, database, overwrite=False)
    assert "copy.db" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == []


def test_an_unwritable_destination_is_named_and_no_file_is_left(tmp_path):
    original = write_database(tmp_path / "s.db")
    with pytest.raises(UserError, match=r"missing/copy\.db cannot be written"):
        backup(tmp_path / "missing" / "copy.db", original, overwrite=False)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder cannot be written"):
        backup(tmp_path / "folder", original, overwrite=True)
    assert [path.name for path in tmp_path.iterdir() if "s.db" not in path.name] == ["folder"]


def test_commits_lost_by_a_restore_on_the_same_disk_are_reported(tmp_path):
    database = write_database(tmp_path / "s.db")
    copy = tmp_path / "copy.db"
    backup(copy, database, overwrite=False)
    write_database(database)  # two commits more
    restore(copy, database, overwrite=True)
    store = Store.open(database)
    assert store.num_commits_missing == 2
    store.close()


@pytest.mark.parametrize("onto", ["another", "itself"])
def test_commits_that_only_the_wal_holds_are_restored(tmp_path, onto):
    db = write_killed_database(tmp_path / "killed.db")
    target = db if onto == "itself" else tmp_path / "new.db"
    restore(db, target, overwrite=onto == "itself")
    assert rows(target, "SELECT seq FROM step_reports") == [(1,), (2,)]
    Store.open(target).close()
    assert rows(target, "SELECT seq FROM step_reports") == [(1,), (2,)]


def test_a_restore_that_fails_at_its_last_step_keeps_the_old_database(tmp_path, monkeypatch):
    db, copy = write_killed_database(tmp_path / "killed.db"), tmp_path / "copy.db"
    backup(copy, write_database(tmp_path / "s.db"), overwrite=False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speclen.store.backup.move_into_place", full)
    with pytest.raises(UserError, match="No space left on device"):
        restore(copy, db, overwrite=True)
    assert rows(db, "SELECT seq FROM step_reports") == [(1,), (2,)]


def test_a_link_to_the_database_remains_a_link(tmp_path):
    volume, link = tmp_path / "volume.db", tmp_path / "speclen.db"
    write_database(volume)
    shutil.copyfile(volume, tmp_path / "backup.db")
    link.symlink_to(volume)
    restore(tmp_path / "backup.db", link, overwrite=True)
    assert link.is_symlink()
    assert rows(volume, "SELECT count(*) FROM contexts") == [(1,)]


def test_a_database_in_use_is_not_replaced(tmp_path):
    database = write_database(tmp_path / "s.db")
    backup(tmp_path / "copy.db", database, overwrite=False)
    store = Store.open(database)
    with pytest.raises(UserError, match="--overwrite"):
        restore(tmp_path / "copy.db", database, overwrite=False)
    with pytest.raises(UserError, match="in use by another controller"):
        restore(tmp_path / "copy.db", database, overwrite=True)
    with pytest.raises(UserError, match="in use by another controller"):
        backup(database, tmp_path / "copy.db", overwrite=True)
    store.close()


def test_a_file_that_is_not_a_backup_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="text"):
        restore(tmp_path / "text", tmp_path / "s.db", overwrite=False)
    with pytest.raises(UserError, match=r"no backup at .*absent"):
        restore(tmp_path / "absent", tmp_path / "s.db", overwrite=False)
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize("harm", [spoil_a_value, lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(5000))])
def test_a_damaged_backup_gets_advice_that_restore_can_follow(tmp_path, harm):
    """Story: it advised a flag of the controller."""
    backup = write_database(tmp_path / "backup.db")
    harm(backup)
    before = {file.name for file in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"backup\.db is damaged .*: make another copy") as no:
        restore(backup, tmp_path / "s.db", overwrite=False)
    assert "--move-corrupt-aside" not in str(no.value)
    assert {file.name for file in tmp_path.iterdir()} == before
