"""A controller that lost its disk comes back from the last backup; a database that is there, or in use, stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import grpc
import pytest

from speclen.cli.backup import backup
from speclen.cli.restore import restore
from speclen.cli.support.errors import UserError
from speclen.store.backup_place import BackupPlace
from speclen.store.database import Store
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.control_fakes import group, registration
from tests.support.controller_process import address_of, report_some, start
from tests.support.database_rows import write_database
from tests.support.store_rows import rows, spoil_a_value


def back_up(db, to, keep: int = 24) -> None:
    backup(None, db, str(to), every=0.0, keep=keep, overwrite=False, as_json=False)


def bring_back(source, db, overwrite: bool = False, if_missing: bool = False) -> None:
    restore(str(source), db, overwrite, if_missing)


def test_killed_and_without_its_disk_a_controller_goes_on_from_the_backup(tmp_path):
    """Reports acknowledged up to the backup are there, later ones may be lost, and workers go on."""
    folder, place = tmp_path / "volume", tmp_path / "backups"
    process = start("--data-dir", str(folder))
    report_some(address_of(process), 20)
    back_up(folder / "speclen.db", place)
    process.kill()
    process.communicate()
    shutil.rmtree(folder)
    bring_back(place, folder / "speclen.db", if_missing=True)
    process = start("--data-dir", str(folder))
    try:
        with grpc.insecure_channel(address_of(process)) as channel:
            stub = rpc.ControlServiceStub(channel)
            assert stub.RegisterWorker(registration(), timeout=30).durable_seq == 20
            # The worker has forgotten 21 to 30: they were acknowledged and died with the disk.
            answers = list(stub.StreamReports(iter([group(31, 40)]), timeout=30))
            assert answers[-1].applied_seq == 40
    finally:
        process.terminate()
        process.communicate()
    assert rows(folder / "speclen.db", "SELECT count(*) FROM step_reports") == [(30,)]
    assert rows(folder / "speclen.db", "SELECT num_missing FROM workers") == [(10,)]


def test_commits_lost_by_a_restore_on_the_same_disk_are_told(tmp_path):
    database = write_database(tmp_path / "s.db")
    copy = tmp_path / "copy.db"
    backup(copy, database, "", every=0.0, keep=1, overwrite=False, as_json=False)
    write_database(database)  # two commits more
    bring_back(copy, database, overwrite=True)
    store = Store.open(database)
    assert store.num_commits_missing == 2
    store.close()


def killed(db: Path) -> Path:
    """As the files of a controller lie that was killed: all that was committed stands in the WAL alone."""
    lines = [
        "import os, sys, pathlib",
        "sys.path.insert(0, sys.argv[2])",
        "from tests.support.store_rows import moment, store_now",
    ]
    lines += ["from speclen.store.database import Store", "store = Store.open(sys.argv[1])"]
    lines += ["assert store_now(store, moment([1, 2])) is None", "os._exit(0)"]
    subprocess.run([sys.executable, "-c", "\n".join(lines), db, Path(__file__).parents[2]], check=True)
    assert db.with_name(db.name + "-wal").stat().st_size > 0
    return db


@pytest.mark.parametrize("onto", ["another", "itself"])
def test_what_stands_in_a_wal_alone_is_brought_back(tmp_path, onto):
    db = killed(tmp_path / "killed.db")
    target = db if onto == "itself" else tmp_path / "new.db"
    bring_back(db, target, overwrite=onto == "itself")
    assert rows(target, "SELECT seq FROM step_reports") == [(1,), (2,)]
    Store.open(target).close()
    assert rows(target, "SELECT seq FROM step_reports") == [(1,), (2,)]


def test_a_restore_that_fails_at_its_last_step_leaves_all_of_the_old_database(tmp_path, monkeypatch):
    db, copy = killed(tmp_path / "killed.db"), tmp_path / "copy.db"
    backup(copy, write_database(tmp_path / "s.db"), "", every=0.0, keep=1, overwrite=False, as_json=False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speclen.store.backup.move_into_place", full)
    with pytest.raises(UserError, match="No space left on device"):
        bring_back(copy, db, overwrite=True)
    assert rows(db, "SELECT seq FROM step_reports") == [(1,), (2,)]


def test_a_link_to_the_database_stays_one(tmp_path):
    volume, link = tmp_path / "volume.db", tmp_path / "speclen.db"
    write_database(volume)
    shutil.copyfile(volume, tmp_path / "backup.db")
    link.symlink_to(volume)
    bring_back(tmp_path / "backup.db", link, overwrite=True)
    assert link.is_symlink()
    assert rows(volume, "SELECT count(*) FROM contexts") == rows(
        tmp_path / "backup.db", "SELECT count(*) FROM contexts"
    )


def test_a_database_in_use_is_not_replaced(tmp_path):
    database = write_database(tmp_path / "s.db")
    back_up(database, tmp_path / "backups")
    store = Store.open(database)
    with pytest.raises(UserError, match="in use by another controller"):
        bring_back(tmp_path / "backups", database, overwrite=True)
    store.close()


def test_only_where_it_is_missing(tmp_path, capsys):
    database = write_database(tmp_path / "s.db")
    place = tmp_path / "backups"
    bring_back(place, tmp_path / "none.db", if_missing=True)
    assert "no backup" in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()
    back_up(database, place)
    before = database.stat().st_ino
    bring_back(place, database, if_missing=True)
    assert database.stat().st_ino == before
    with pytest.raises(UserError, match="--overwrite"):
        bring_back(place, database)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": None, "to": ""}, "one of them"),
        ({"to": "x"}, "one of them"),
        ({"to": "", "every": 60.0}, "--to"),
        ({"target": None, "every": 0.1}, "too often"),
    ],
)
def test_backups_that_make_no_sense_are_refused(tmp_path, options, words):
    given = {"target": tmp_path / "f", "to": str(tmp_path / "p"), "every": 0.0, "keep": 1, "overwrite": False}
    with pytest.raises(UserError, match=words):
        backup(db=tmp_path / "s.db", as_json=False, **(given | options))


def test_one_copy_is_brought_back_by_its_name(tmp_path):
    database, place = write_database(tmp_path / "s.db"), f"memory://{uuid.uuid4().hex}"
    back_up(database, place)
    [name] = BackupPlace(place, "s").names()
    write_database(database)
    back_up(database, place)
    bring_back(f"{place}/{name}", tmp_path / "new.db")
    assert rows(tmp_path / "new.db", "PRAGMA user_version") == [(2,)]
    with pytest.raises(UserError, match=r"does not give s-20000101T000000\.000Z\.db"):
        bring_back(f"{place}/s-20000101T000000.000Z.db", tmp_path / "other.db")


def test_what_is_no_backup_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UserError, match="text"):
        bring_back(tmp_path / "text", tmp_path / "s.db")
    with pytest.raises(UserError, match=r"no backup at .*absent"):
        bring_back(tmp_path / "absent", tmp_path / "s.db")
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize("harm", [spoil_a_value, lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(5000))])
def test_a_damaged_backup_gets_advice_that_restore_can_follow(tmp_path, harm):
    """It advised a flag of the controller."""
    backup = write_database(tmp_path / "backup.db")
    harm(backup)
    before = {file.name for file in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"backup\.db is damaged .*: take another copy") as no:
        bring_back(backup, tmp_path / "s.db")
    assert "--move-corrupt-aside" not in str(no.value)
    assert {file.name for file in tmp_path.iterdir()} == before
