"""The schema: every old version reaches the newest, a failing step leaves no trace, a newer file is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

import speclen.store
from speclen.store.connection import StoreError, connect_reader, connect_writer, sqlite3
from speclen.store.schema import migrations
from speclen.store.schema.migrations import applied_steps, migrate, newest_schema, schema_text
from speclen.store.schema.steps import STEPS

SCHEMA_FILE = Path(speclen.store.__file__).with_name("schema.sql")


def test_schema_file_shows_what_the_steps_lead_to():
    assert SCHEMA_FILE.read_text() == newest_schema(), (
        "run: python -m speclen.store.schema.migrations > store/schema.sql"
    )


def test_every_table_is_strict_and_says_what_it_holds():
    for statement in newest_schema().split(";\n"):
        if "CREATE TABLE" in statement:
            assert ") STRICT" in statement
            assert statement[statement.index("CREATE TABLE") :].splitlines()[1].startswith("  -- "), statement


@pytest.mark.parametrize("last", list(STEPS))
def test_every_old_version_reaches_the_newest_and_keeps_its_rows(tmp_path, last):
    path = tmp_path / "old.db"
    connection = connect_writer(path)
    later = list(STEPS)[list(STEPS).index(last) + 1 :]
    migrate(path, connection, stop_before=later[0] if later else None)
    assert applied_steps(connection)[-1] == last
    columns = [row[1] for row in connection.execute("PRAGMA table_info(contexts)")][:11]  # the later ones have defaults
    connection.execute(
        f"INSERT INTO contexts ({', '.join(columns)}) VALUES (1, 't', 'd', 'cpu', 'float32', '', 32, 8, 0, 0.0, 0.0)"
    )
    migrate(path, connection)
    assert applied_steps(connection) == list(STEPS)
    assert connection.execute("SELECT target FROM contexts").fetchall() == [("t",)]
    assert migrations.SCHEMA_HEADER + schema_text(connection) == newest_schema()
    connection.close()


def test_a_failing_step_rolls_back_whole_and_can_be_repeated(tmp_path, monkeypatch):
    path = tmp_path / "half.db"
    connection = connect_writer(path)
    migrate(path, connection)
    before = schema_text(connection)
    bad = {**STEPS, "m999_bad": ("CREATE TABLE half (a INTEGER) STRICT", "CREATE TABLE nonsense (")}
    monkeypatch.setattr(migrations, "STEPS", bad)
    with pytest.raises(Exception, match="incomplete input"):
        migrate(path, connection)
    assert schema_text(connection) == before
    assert "m999_bad" not in applied_steps(connection)
    monkeypatch.setattr(migrations, "STEPS", {**bad, "m999_bad": ("CREATE TABLE half (a INTEGER) STRICT",)})
    migrate(path, connection)
    assert applied_steps(connection)[-1] == "m999_bad"
    connection.close()


def test_a_first_start_that_is_cut_off_leaves_no_file_that_says_it_is_ours(tmp_path, monkeypatch):
    """It said so and had no tables, of which whoever read it heard in words of SQLite's."""
    path = tmp_path / "new.db"
    connection = connect_writer(path)
    first = next(iter(STEPS))
    monkeypatch.setattr(migrations, "STEPS", {first: STEPS[first], "m002_bad": ("CREATE TABLE nonsense (",)})
    with pytest.raises(Exception, match="incomplete input"):
        migrate(path, connection)
    monkeypatch.undo()
    assert applied_steps(connection) == []
    assert schema_text(connection) == "\n"
    connection.close()
    with pytest.raises(StoreError, match=r"has no tables"):
        connect_reader(path)
    with closing(connect_writer(path)) as connection:
        migrate(path, connection)
        assert applied_steps(connection) == list(STEPS)
    connect_reader(path).close()


def test_a_file_of_a_newer_program_is_refused_and_not_touched(tmp_path, monkeypatch):
    path = tmp_path / "new.db"
    connection = connect_writer(path)
    monkeypatch.setattr(migrations, "STEPS", {**STEPS, "m999_future": ("CREATE TABLE future (a INTEGER) STRICT",)})
    migrate(path, connection)
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"newer speclen.*'m999_future'.*upgrade"):
        migrate(path, connection)
    assert "future" in Database(connection).table_names()
    connection.close()


def test_another_programs_database_is_refused_and_not_touched(tmp_path):
    """It was said to stay untouched, and was switched to WAL."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"not one of speclen's"):
        connect_writer(path)
    assert path.read_bytes() == before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
        with pytest.raises(StoreError, match=r"not one of speclen's"):
            migrate(path, connection)
        assert Database(connection).table_names() == ["bookmarks"]
