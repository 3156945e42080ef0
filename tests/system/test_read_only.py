"""Read-only databases, of another user or on a read-only disk: every verb that reads one works."""

import json
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.store.connection import StoreError, connect_reader
from speclen.store.schema import Commit
from tests.support.database_rows import write_database, write_killed_database
from tests.support.store_rows import report, without_write_permission, written


@pytest.fixture
def folder():
    """For the database. Not in pytest's own, which no other user may enter. Beside it is a folder that anybody may fill."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        for inner, mode in (("data", 0o755), ("copies", 0o777)):
            (Path(name) / inner).mkdir()
            (Path(name) / inner).chmod(mode)
        yield Path(name) / "data"


@pytest.mark.parametrize("wal", ["none", "empty"])
@pytest.mark.parametrize("verb", ["tables", "explain --batch 3", "doctor --json", "export --format json", "replay"])
def test_a_verb_prints_the_same_without_write_permission(folder, verb, wal):
    path = write_database(folder / "s.db")
    if wal == "empty":
        (folder / "s.db-wal").touch()
    command = [*verb.split(), "--db", str(path)]
    usual = CliRunner().invoke(app, command)
    with without_write_permission(folder):
        found = CliRunner().invoke(app, command)
    assert found.exit_code == usual.exit_code, found.output
    if verb.startswith("doctor"):
        assert {each["status"] for each in json.loads(found.stdout)} == {"ok"}, found.stdout
        assert wal == "empty" or "values were not checked, as the file is read-only" in found.stdout
    else:
        assert found.output == usual.output


def test_a_backup_needs_no_write_permission(folder):
    path, target = write_database(folder / "s.db"), folder.parent / "copies" / "copy.db"
    with without_write_permission(folder):
        assert CliRunner().invoke(app, ["backup", str(target), "--db", str(path)]).exit_code == 0
    with closing(connect_reader(target)) as copied:
        assert copied.execute("SELECT count(*) FROM step_reports").fetchone()[0] == 3


def test_commits_in_the_wal_of_a_killed_controller_are_read_or_refused(folder):
    path = write_killed_database(folder / "s.db")
    with without_write_permission(folder), closing(connect_reader(path)) as reader:
        assert reader.execute("SELECT count(*) FROM step_reports").fetchone()[0] == 2
    (folder / "s.db-shm").unlink()
    with (
        without_write_permission(folder),
        pytest.raises(StoreError, match=r"s.db-wal holds its last commits .* copy both"),
    ):
        connect_reader(path)


def test_a_reader_without_locks_notices_a_controller(folder):
    path = write_database(folder / "s.db")
    with without_write_permission(folder):
        reader = connect_reader(path)
    written(path, Commit(reports=[report(4)]))
    with pytest.raises(StoreError, match=r"a controller opened .* try again"):
        reader.close()
