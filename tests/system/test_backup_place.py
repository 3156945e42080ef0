"""Whatever name of a backup can be seen is a whole backup, however often its maker is killed; the newest are kept."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from speclen.store.backup import check_file
from speclen.store.backup_place import BackupPlace, restore_newest, stamp
from speclen.store.connection import StoreError, sqlite3
from speclen.store.database import Store
from tests.support.database_rows import write_database
from tests.support.store_rows import moment, report, rows, spoil_a_value, store_now

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


@pytest.fixture(params=["folder", "remote"])
def url(request, tmp_path) -> str:
    """A folder of this machine, and a file system that is none."""
    return str(tmp_path / "backups") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def test_the_newest_are_kept_in_order(tmp_path, url):
    database, place = write_database(tmp_path / "s.db"), BackupPlace(url, "s", keep=3)
    made = [place.add(database, NOON + timedelta(seconds=at)).name for at in range(5)]
    assert place.names() == made[2:] == [f"s-20261122T12000{at}.000Z.db" for at in (2, 3, 4)]
    assert BackupPlace(url, "other").names() == []


def test_a_clock_that_goes_back_does_not_make_a_new_backup_old():
    names = ["s-20261122T120000.999Z.db"]
    assert stamp(NOON - timedelta(days=1), names) == "20261122T120001.000"
    assert stamp(NOON + timedelta(days=1), names) == "20261123T120000.000"


def test_a_backup_is_a_database_to_go_on_from(tmp_path, url):
    database, place = write_database(tmp_path / "s.db"), BackupPlace(url, "s")
    made = place.add(database)
    target = tmp_path / "new" / "s.db"
    assert restore_newest(place, target, tell=pytest.fail) == made.name
    assert rows(target, "PRAGMA user_version") == [(made.commit,)]
    first, second = Store.open(database), Store.open(target)
    assert first.load() == second.load()
    assert store_now(second, moment([4], reports=[report(4)])) is None
    first.close()
    second.close()


def test_a_place_without_folders_begins_empty(tmp_path, monkeypatch):
    """As in S3: a prefix under which nothing lies is not there, whatever was made."""
    monkeypatch.setattr(MemoryFileSystem, "makedirs", lambda self, path, exist_ok=False: None)
    database, url = write_database(tmp_path / "s.db"), f"memory://{uuid.uuid4().hex}/of/ours"
    assert not restore_newest(BackupPlace(url, "s"), tmp_path / "new.db", tell=pytest.fail)
    place = BackupPlace(url, "s")
    made = place.add(database)
    assert place.names() == [made.name]


def test_an_upload_that_breaks_off_leaves_no_name_behind(tmp_path, monkeypatch):
    database, url = write_database(tmp_path / "s.db"), f"memory://{uuid.uuid4().hex}"
    place = BackupPlace(url, "s")
    whole = place.add(database)
    fs, root = fsspec.core.url_to_fs(url)

    def broken(local: str, remote: str, **_: object) -> None:
        fs.pipe_file(remote, Path(local).read_bytes()[:1000])  # and the rest never comes

    monkeypatch.setattr(type(fs), "put_file", lambda self, *arguments, **more: broken(*arguments, **more))
    with pytest.raises(StoreError, match="did not arrive whole"):
        place.add(database)
    assert place.names() == [whole.name]
    assert len(fs.ls(root)) == 2  # the part is there, without a name that counts
    monkeypatch.undo()
    later = BackupPlace(url, "s")
    assert later.names() == [whole.name]
    assert len(fs.ls(root)) == 2  # who only looks leaves alone what another may be about to finish
    second = later.add(database)
    assert sorted(path.rpartition("/")[2] for path in fs.ls(root, detail=False)) == [whole.name, second.name]


def test_a_damaged_backup_is_told_and_the_one_before_is_taken(tmp_path, url):
    database, place = write_database(tmp_path / "s.db"), BackupPlace(url, "s")
    sound, damaged = place.add(database), place.add(database)
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/{damaged.name}", b"SQLite format 3\0" + b"nonsense" * 1000)
    told: list[str] = []
    assert restore_newest(place, tmp_path / "new.db", told.append) == sound.name
    assert len(told) == 1
    assert damaged.name in told[0]
    fs.pipe_file(f"{root}/{sound.name}", b"")
    with pytest.raises(StoreError, match=r"none of 2 backups .* is sound"):
        restore_newest(place, tmp_path / "newer.db", told.append)
    assert not (tmp_path / "newer.db").exists()


def test_a_backup_with_a_damaged_value_is_left_out_for_the_one_before(tmp_path):
    """Such a one was found only once it had been copied, when nobody looked for another any more."""
    database, place = write_database(tmp_path / "s.db"), BackupPlace(str(tmp_path / "backups"), "s")
    sound, damaged = place.add(database), place.add(database)
    spoil_a_value(tmp_path / "backups" / damaged.name)
    told: list[str] = []
    assert restore_newest(place, tmp_path / "new.db", told.append) == sound.name
    assert "CHECK constraint failed in step_reports" in told[0]
    names = {file.name for file in (tmp_path / "backups").iterdir()}
    with pytest.raises(StoreError, match=r"is damaged .*: take another copy") as refused:
        check_file(tmp_path / "backups" / damaged.name)
    assert "--move-corrupt-aside" not in str(refused.value)
    assert {file.name for file in (tmp_path / "backups").iterdir()} == names


def test_a_copy_that_cannot_be_fetched_is_no_damaged_one(tmp_path, monkeypatch):
    """Story: a store that timed out on the newest copy had an older one restored, and nobody was told of a failure."""
    database, place = write_database(tmp_path / "s.db"), BackupPlace(f"memory://{uuid.uuid4().hex}", "s")
    place.add(database)
    newest = place.add(database).name
    get_file = MemoryFileSystem.get_file

    def timed_out(fs: MemoryFileSystem, remote: str, local: str, **more: object) -> None:
        if newest in remote:
            raise TimeoutError("timed out")
        get_file(fs, remote, local, **more)

    def broken_off(fs: MemoryFileSystem, remote: str, local: str, **more: object) -> None:
        get_file(fs, remote, local, **more)
        if newest in remote:
            Path(local).write_bytes(Path(local).read_bytes()[:5000])

    for failing, words in ((timed_out, "timed out"), (broken_off, "did not arrive whole")):
        monkeypatch.setattr(MemoryFileSystem, "get_file", failing)
        with pytest.raises(StoreError, match=rf"{newest} \(.*{words}\): try again.* by its name") as refused:
            restore_newest(place, tmp_path / "new.db", tell=pytest.fail)
        assert "--to" not in str(refused.value)
        assert not (tmp_path / "new.db").exists()
    monkeypatch.undo()
    assert restore_newest(place, tmp_path / "new.db", tell=pytest.fail) == newest


def test_a_disk_that_fails_while_a_copy_is_read_does_not_make_it_a_damaged_one(tmp_path, monkeypatch):
    database, place = write_database(tmp_path / "s.db"), BackupPlace(str(tmp_path / "backups"), "s")
    place.add(database)
    place.add(database)

    def failing(_: object) -> str:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    monkeypatch.setattr("speclen.store.backup.first_problem", failing)
    with pytest.raises(StoreError, match=r"cannot be opened \(disk I/O error\)"):
        restore_newest(place, tmp_path / "new.db", tell=pytest.fail)


def test_a_full_temporary_folder_is_told_where_one_is_needed(tmp_path, url, monkeypatch):
    """A folder's copy is made and read in its place."""
    database, place = write_database(tmp_path / "s.db"), BackupPlace(url, "s")
    made = place.add(database)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    if url.startswith("memory://"):
        with pytest.raises(StoreError, match="TMPDIR"):
            place.add(database)
        with pytest.raises(StoreError, match="TMPDIR"):
            restore_newest(place, tmp_path / "new.db", tell=pytest.fail)
    else:
        assert restore_newest(place, tmp_path / "new.db", tell=pytest.fail) == made.name
        assert place.add(database).name in place.names()


def begin_anew(database: Path) -> None:
    """As a controller does that finds none: one commit."""
    for file in database.parent.glob(f"{database.name}*"):
        file.unlink()
    store = Store.open(database)
    assert store_now(store, moment([1])) is None
    store.close()


def test_copies_of_a_database_begun_anew_do_not_push_out_what_was_learned(tmp_path, url):
    """Story: the database was deleted, and as many minutes later as copies are kept all that was learned was gone."""
    database, place = tmp_path / "s.db", BackupPlace(url, "s", keep=2)
    learned = [place.add(write_database(database), NOON + timedelta(seconds=at)).name for at in range(2)]
    begin_anew(database)
    made = [place.add(database, NOON + timedelta(minutes=1 + at)) for at in range(4)]
    assert place.names() == [learned[1], made[2].name, made[3].name]
    assert f"speclen restore {url}/{learned[1]} --db {database} --overwrite" in made[0].warning
    assert [bool(each.warning) for each in made] == [True, False, False, False]
    later = BackupPlace(url, "s", keep=2)
    assert learned[1] in later.add(database, NOON + timedelta(minutes=9)).warning
    for _ in range(2):
        write_database(database)  # at last it has more commits than the one of before
    assert not later.add(database, NOON + timedelta(minutes=10)).warning
    assert learned[1] not in later.names()
    assert len(later.names()) == 2


def test_a_place_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for url, words in ((str(tmp_path / "file"), "file"), ("nosuch://there", "nosuch")):
        with pytest.raises(StoreError, match=words) as refused:
            BackupPlace(url)
        assert "\n" not in str(refused.value)


def test_a_maker_killed_at_any_moment_leaves_only_whole_backups(tmp_path):
    """As a controller writes on, `speclen backup` is killed again and again."""
    database, place, dice = tmp_path / "s.db", tmp_path / "backups", random.Random(0)
    store, seq = Store.open(database), 5000
    store_now(store, moment(range(1, seq + 1)))
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-m", "speclen.cli.app", "backup"]
            + ["--every", "1", "--to", str(place), "--db", str(database), "--keep", "3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        process.stdout.readline()  # the first copy of this life
        kill_at = time.monotonic() + dice.uniform(0.9, 1.2)
        while time.monotonic() < kill_at:
            seq += 1
            assert store_now(store, moment([seq], reports=[report(seq)])) is None
        process.kill()
        process.communicate()
        names = BackupPlace(str(place), "s").names()
        assert 1 <= len(names) <= 4  # one may be more than the bound for a moment
        for name in names:
            check_file(place / name)
    store.close()
    [(applied, stored)] = rows(
        place / names[-1], "SELECT applied_seq, (SELECT count(*) FROM step_reports) FROM workers"
    )
    assert 5000 < applied == stored <= seq
