"""A backup is of one moment, whole, and does not disturb the writer; what cannot be written leaves nothing behind."""

from __future__ import annotations

import threading

import pytest

from speclen.cli.backup import backup
from speclen.cli.support.errors import UserError
from speclen.store.database import Store
from tests.support.database_rows import write_database
from tests.support.store_rows import moment, report, rows, spoil_a_page, spoil_a_value, store_now


def test_a_backup_while_the_controller_writes_is_of_one_moment(tmp_path):
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


def test_an_existing_file_is_only_replaced_when_told(tmp_path):
    original, copy = write_database(tmp_path / "s.db"), tmp_path / "copy.db"
    copy.write_text("precious")
    with pytest.raises(UserError, match="--overwrite"):
        backup(copy, original, overwrite=False)
    assert copy.read_text() == "precious"
    backup(copy, original, overwrite=True)
    assert rows(copy, "SELECT count(*) FROM step_reports") == [(3,)]


def test_the_database_is_no_place_for_its_copy(tmp_path):
    """A link to it, either: what is renamed over it is another file than the one that the controller writes to."""
    database = write_database(tmp_path / "s.db")
    (tmp_path / "link.db").symlink_to(database)
    before = database.stat().st_ino
    for target in (database, tmp_path / "link.db"):
        with pytest.raises(UserError, match="is the database itself"):
            backup(target, database, overwrite=True)
    assert database.stat().st_ino == before


@pytest.mark.parametrize("harm", [spoil_a_value, spoil_a_page])
def test_a_database_that_cannot_be_copied_is_named_and_not_the_place(tmp_path, harm):
    """Whoever was told that the place cannot be written looked at the wrong disk."""
    database, copy = write_database(tmp_path / "s.db"), tmp_path / "copy.db"
    harm(database)
    with pytest.raises(UserError, match=r"s\.db cannot be copied \(.*\): look at it with `speclen doctor`") as refused:
        backup(copy, database, overwrite=False)
    assert "copy.db" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir() if "copy" in path.name] == []


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    original = write_database(tmp_path / "s.db")
    with pytest.raises(UserError, match=r"missing/copy\.db cannot be written"):
        backup(tmp_path / "missing" / "copy.db", original, overwrite=False)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"folder cannot be written"):
        backup(tmp_path / "folder", original, overwrite=True)
    assert [path.name for path in tmp_path.iterdir() if "s.db" not in path.name] == ["folder"]
