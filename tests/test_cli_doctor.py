"""`speclen doctor` finds what was broken on purpose, and nothing where nothing is broken."""

from __future__ import annotations

import contextlib
import json
import re
import time

import pytest
from database_rows import write_database
from store_rows import moment, report, rows, store_now
from typer.testing import CliRunner

from speclen.cli import doctor as module
from speclen.cli.app import app
from speclen.cli.doctor import examine
from speclen.console.errors import UserError
from speclen.store.connection import connect_writer, sqlite3
from speclen.store.database import Store
from speclen.store.schema import migrations
from speclen.store.schema.migrations import migrate
from speclen.store.schema.steps import STEPS


def statuses(path, **options) -> dict[str, str]:
    return {finding.check: finding.status for finding in examine(path, **options)}


def advice(path, check: str) -> str:
    return next(finding.advice for finding in examine(path) if finding.check == check)


def test_a_sound_database_passes_every_check(tmp_path):
    path = write_database(tmp_path / "s.db")
    assert statuses(path) == dict.fromkeys(
        ("library", "writer", "schema", "integrity", "space", "workers", "losses"), "ok"
    )
    assert "integrity" not in statuses(path, quick=True)


def test_it_can_look_while_a_controller_writes(tmp_path):
    store = Store.open(tmp_path / "s.db")
    store_now(store, moment([1]))
    findings = {finding.check: finding for finding in examine(store.path)}
    assert findings["writer"].found == "a controller is running"
    assert findings["integrity"].status == "ok"
    assert store_now(store, moment([2])) is None
    store.close()
    assert {finding.check: finding.found for finding in examine(store.path)}["writer"] == "no controller is running"


def test_a_damaged_page_is_found(tmp_path):
    path = write_database(tmp_path / "s.db")
    [(page,)] = rows(path, "SELECT rootpage FROM sqlite_schema WHERE name = 'learned_states'")
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\x5a" * 4096
    path.write_bytes(content)
    assert statuses(path)["integrity"] == "failed"
    assert "restore a backup" in advice(path, "integrity")


def test_a_dangling_reference_is_found(tmp_path):
    path = write_database(tmp_path / "s.db")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DELETE FROM contexts")
    connection.close()
    assert statuses(path)["integrity"] == "failed"


def test_a_stale_worker_and_one_whose_reports_are_refused_are_named(tmp_path):
    path = write_database(tmp_path / "s.db", last_seen_at=time.time() - 7200, num_refused=50)
    named = [finding for finding in examine(path) if finding.check == "worker worker-1"]
    assert [finding.status for finding in named] == ["warning", "warning"]
    assert "last heard" in named[0].found
    assert "50 of its reports were refused" in named[1].found


def test_what_was_given_up_is_told(tmp_path):
    store = Store.open(tmp_path / "s.db")
    store_now(store, moment([1, 2], reports=[report(1), report(2, latency_s=-1.0)]))
    store.close()
    assert statuses(store.path)["rows refused"] == "warning"
    assert "please report this" in advice(store.path, "rows refused")


def test_every_kind_of_loss_that_the_schema_knows_is_told_with_advice(tmp_path):
    store = Store.open(tmp_path / "s.db")
    assert store_now(store, moment([1, 2])) is None
    store.close()
    [(text,)] = rows(store.path, "SELECT sql FROM sqlite_schema WHERE name = 'store_events'")
    kinds = re.findall(r"'(\w+)'", text[text.index("CHECK (kind IN") :].partition(")")[0])
    assert len(kinds) == 4
    with contextlib.closing(connect_writer(store.path)) as connection:
        for kind in kinds:
            values = kind, 1, "a test", time.time()
            connection.execute(
                "INSERT INTO store_events (kind, num_rows, detail, happened_at) VALUES (?, ?, ?, ?)", values
            )
    told = {finding.check: finding for finding in examine(store.path)}
    for kind in kinds:
        finding = told[kind.replace("_", " ")]
        assert (finding.status, finding.advice != "see the controller's log") == ("warning", True)


def test_little_space_is_a_warning(tmp_path, monkeypatch):
    path = write_database(tmp_path / "s.db")
    monkeypatch.setattr(module, "LOW_SPACE_BYTES", 1 << 60)
    assert statuses(path)["space"] == "warning"


def test_older_and_newer_schemas_are_told_apart(tmp_path, monkeypatch):
    connection = connect_writer(tmp_path / "old.db")
    migrate(tmp_path / "old.db", connection, stop_before="m004_store_events")
    connection.close()
    assert statuses(tmp_path / "old.db")["schema"] == "warning"
    path = write_database(tmp_path / "new.db")
    connection = connect_writer(path)
    with monkeypatch.context() as patched:
        patched.setattr(migrations, "STEPS", {**STEPS, "m999_future": ("CREATE TABLE future (a INTEGER) STRICT",)})
        migrate(path, connection)
    connection.close()
    assert statuses(path)["schema"] == "failed"
    assert "upgrade speclen" in advice(path, "schema")


def test_a_file_that_is_no_database_fails_and_a_missing_one_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("hello " * 1000)
    assert statuses(tmp_path / "text.db") == {"file": "failed"}
    with pytest.raises(UserError, match="there is no database"):
        examine(tmp_path / "none.db")


def test_the_exit_code_says_whether_something_failed(tmp_path):
    path = write_database(tmp_path / "s.db")
    result = CliRunner().invoke(app, ["doctor", "--db", str(path), "--json"])
    assert result.exit_code == 0
    assert {finding["status"] for finding in json.loads(result.stdout)} == {"ok"}
    (tmp_path / "text.db").write_text("hello " * 1000)
    result = CliRunner().invoke(app, ["doctor", "--db", str(tmp_path / "text.db")])
    assert result.exit_code == 1
    assert "failed" in result.stdout
