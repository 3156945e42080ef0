"""`speclen doctor` finds deliberate damage, and nothing in a sound database."""

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speclen.cli import doctor as module
from speclen.cli.app import app
from speclen.cli.doctor import examine
from speclen.cli.support.output import UserError
from speclen.store.connection import APPLICATION_ID, CorruptStoreError, connect_writer, sqlite3
from speclen.store.database import Store
from tests.support.database_rows import write_database, write_killed_database
from tests.support.store_rows import moment, rows, spoil_a_page, spoil_a_value, store_now, worker, written


def statuses(path, **options) -> dict[str, str]:
    return {finding.check: finding.status for finding in examine(path, **options)}


def advice(path, check: str) -> str:
    return next(finding.advice for finding in examine(path) if finding.check == check)


def test_a_sound_database_passes_every_check(tmp_path):
    path = write_database(tmp_path / "s.db")
    assert statuses(path) == dict.fromkeys(("library", "writer", "integrity", "space", "workers", "losses"), "ok")
    assert "integrity" not in statuses(path, quick=True)


def leave_references_dangling(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM contexts")


@pytest.mark.parametrize("harm", [spoil_a_page, leave_references_dangling])
def test_damage_is_reported_with_advice(tmp_path, harm):
    path = write_database(tmp_path / "s.db")
    harm(path)
    assert statuses(path)["integrity"] == "failed"
    assert "restore a backup" in advice(path, "integrity")


def test_a_damaged_value_is_found_and_nothing_is_changed_or_left_behind(tmp_path):
    """Story: SQLite skips CHECK constraints on read-only files, so doctor passed files that the controller refuses."""
    path = write_database(tmp_path / "s.db")
    spoil_a_value(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    found = {finding.check: finding for finding in examine(path)}["integrity"]
    assert (found.status, found.found) == ("failed", "CHECK constraint failed in step_reports")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(CorruptStoreError):
        Store.open(path)


def test_the_wal_of_a_killed_controller_is_left_unchanged(tmp_path):
    """The last connection with write access moves a WAL into the file and deletes it; doctor must not."""
    path, link = tmp_path / "s.db", tmp_path / "links" / "other.db"
    write_killed_database(path)
    link.parent.mkdir()
    link.symlink_to(path)
    before = path.read_bytes(), path.with_name("s.db-wal").read_bytes()
    for name in (path, link):
        assert statuses(name)["integrity"] == "ok"
        assert (path.read_bytes(), path.with_name("s.db-wal").read_bytes()) == before
    assert list(link.parent.iterdir()) == [link]


def test_the_wal_of_a_running_controller_is_kept(tmp_path):
    """Another process reads, as people do; the writer continues in the same files."""
    store = Store.open(tmp_path / "s.db")
    assert store_now(store, moment([1])) is None
    files = {file: file.stat().st_ino for file in tmp_path.iterdir()}
    assert len(files) == 4
    for seq in (2, 3):
        command = [sys.executable, "-m", "speclen.cli.app", "doctor", "--db", str(store.path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = {finding["check"]: finding for finding in json.loads(done.stdout)}
        assert found["writer"]["found"] == "a controller is running"
        assert found["integrity"]["status"] == "ok"
        assert {file: file.stat().st_ino for file in tmp_path.iterdir()} == files
        assert store_now(store, moment([seq])) is None
    store.close()
    assert rows(store.path, "SELECT seq FROM step_reports") == [(1,), (2,), (3,)]
    assert {finding.check: finding.found for finding in examine(store.path)}["writer"] == "no controller is running"


def test_stale_and_refused_workers_are_summarised_in_a_few_lines(tmp_path):
    """Story: a line was printed for each pod that had ever existed, since every pod has its own name."""
    seen = [time.time() - 7200 - number for number in range(100)]
    gone = [worker(0, number, last_seen_at=at, num_refused=50) for number, at in enumerate(seen, start=1)]
    findings = examine(written(tmp_path / "s.db", moment([], workers=gone)))
    named = [finding for finding in findings if finding.check.startswith("worker ")]
    assert len(named) == 2 * module.MOST_NAMED
    assert [finding.check for finding in named[:2]] == ["worker worker-1", "worker worker-2"], "heard last"
    assert {finding.status for finding in named} == {"warning"}
    assert "last active" in named[0].found
    assert "50 of its reports were refused" in named[-1].found
    [total, rest] = [finding.found for finding in findings if finding.check == "workers"]
    assert total == "100 known, 0 active within the hour"
    assert rest.startswith(f"{100 - module.MOST_NAMED} more have been stale")


def test_every_kind_of_loss_in_the_schema_has_advice(tmp_path):
    path = written(tmp_path / "s.db", moment([1, 2]))
    [(text,)] = rows(path, "SELECT sql FROM sqlite_schema WHERE name = 'store_events'")
    kinds = re.findall(r"'(\w+)'", text[text.index("CHECK (kind IN") :].partition(")")[0])
    assert len(kinds) == 4
    with contextlib.closing(connect_writer(path)) as connection:
        for kind in kinds:
            values = kind, 1, "a test", time.time()
            connection.execute(
                "INSERT INTO store_events (kind, num_rows, detail, happened_at) VALUES (?, ?, ?, ?)", values
            )
    told = {finding.check: finding for finding in examine(path)}
    for kind in kinds:
        finding = told[kind.replace("_", " ")]
        assert (finding.status, finding.advice != "see the controller's log") == ("warning", True)


def test_a_file_without_tables_fails_with_advice(tmp_path):
    """Story: a killed first start left such a file, on which the verb ended with a traceback."""
    path = tmp_path / "s.db"
    with contextlib.closing(connect_writer(path)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    assert statuses(path) == {"file": "failed"}
    assert advice(path, "file") == "start a controller on it, or delete it"
    Store.open(path).close()
    assert statuses(path)["integrity"] == "ok"
    (tmp_path / "empty.db").touch()
    with pytest.raises(UserError, match="there is no database"):
        examine(tmp_path / "empty.db")


def test_the_exit_code_reports_failures_and_the_path_is_printed_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_database(tmp_path / "s.db")
    result = CliRunner().invoke(app, ["doctor", "--db", "s.db", "--json"])
    assert result.exit_code == 0
    assert {finding["status"] for finding in json.loads(result.stdout)} == {"ok"}
    Path("bad.db").write_text("hello " * 1000)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor", "--db", "bad.db"])
    assert (result.exit_code, "failed" in result.stdout) == (1, True)
    assert "bad.db is damaged (file is not a database). Restore a backup over it" in result.stdout
    assert "--move-corrupt-aside" in result.stdout
    assert ".." not in result.stdout
