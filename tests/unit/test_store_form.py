"""A new file becomes a database; one of another form or another program is refused in one sentence and stays as it is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import speclen.store
from speclen.store.connection import APPLICATION_ID, StoreError, connect_reader, connect_writer, sqlite3
from speclen.store.database import Store
from tests.support import store_rows

SCHEMA = Path(speclen.store.__file__).with_name("schema.sql").read_text()


def other_database(path: Path, application_id: int) -> bytes:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE latency_cells (x)")
        connection.execute(f"PRAGMA application_id = {application_id}")
    return path.read_bytes()


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
def test_another_form_is_refused_and_stays(tmp_path, opened, application_id, words):
    path = tmp_path / "s.db"
    before = other_database(path, application_id)
    with pytest.raises(StoreError, match=words):
        opened(path)
    assert path.read_bytes() == before


def test_a_new_file_has_the_schema_word_for_word(tmp_path):
    Store.open(tmp_path / "s.db").close()
    for (created,) in store_rows.rows(tmp_path / "s.db", "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"):
        assert f"{created};" in SCHEMA


def test_a_file_without_tables_is_named_to_a_reader(tmp_path):
    connect_writer(tmp_path / "s.db").close()
    with pytest.raises(StoreError, match="has no tables"):
        connect_reader(tmp_path / "s.db")
    Store.open(tmp_path / "s.db").close()
    connect_reader(tmp_path / "s.db").close()
