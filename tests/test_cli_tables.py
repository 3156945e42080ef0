"""`speclen tables` shows what learned_table holds: the matrix for people, the rows for programs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from database_rows import write_database
from store_rows import cell, context, rows, store_now
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.cli.tables import learned_rows
from speclen.console.errors import UserError
from speclen.store.database import Store
from speclen.store.records import Commit


@pytest.fixture
def database(tmp_path):
    return write_database(tmp_path / "s.db")


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"}).invoke(app, ["tables", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_matrix_marks_what_is_in_use_and_what_was_never_measured(database):
    lines = [re.findall(r"[^\s│┃]+", line) for line in run("--db", str(database)).splitlines()]
    assert ["batch", "0", "2", "vs", "0", "seen", "steps"] in lines
    assert ["1-2", "*10", "15?", "1.00x", "7"] in lines
    assert ["3-4", "20", "*10", "2.00x?", "1,200"] in lines


def test_batch_sizes_with_one_length_are_shown_together_beside_what_was_seen(tmp_path):
    """1 to 3 use length 2; length 0 was played lately at 2 alone, and not at 4, where another length is in use."""
    cells = []
    for size, best, since in ((1, 2, None), (2, 2, 50), (3, 2, None), (4, 1, 20_000)):
        plain = {"num_steps": 9, "observed_step_s": 0.02, "num_reports_since": since} if since else {"num_steps": 0}
        cells.append(cell(0, size, size, step_s=0.020, expected_tokens=1.0, **plain))
        for length in (1, 2):
            steps = 99 if length == best else 0
            took = {"observed_step_s": 0.018, "num_reports_since": 1} if steps else {}
            cells.append(cell(length, size, size, is_best=length == best, num_steps=steps, **took))
    store = Store.open(tmp_path / "s.db")
    assert store_now(store, Commit(contexts=[context()], latency_cells=cells)) is None
    store.close()
    lines = [re.findall(r"[^\s│┃]+", line) for line in run("--db", str(tmp_path / "s.db")).splitlines()]
    assert ["1-3", "20", "10?", "*10", "2.00x", "11.2", "306"] in lines
    assert ["4", "20", "*10", "10?", "2.00x?", "11.2", "108"] in lines
    choices = rows(tmp_path / "s.db", "SELECT batch, length, speedup FROM choices")
    assert choices == [("1-3", 2, 2.0), ("4", 1, 2.0)]


def test_json_and_csv_are_the_rows_of_the_view(database):
    expected = rows(database, "SELECT * FROM learned_table")
    assert len(expected) == 4
    parsed = json.loads(run("--db", str(database), "--json"))
    assert [tuple(row.values()) for row in parsed] == expected
    table = list(csv.DictReader(io.StringIO(run("--db", str(database), "--csv"))))
    assert [tuple(row.values()) for row in table] == [
        tuple("" if value is None else str(value) for value in row) for row in expected
    ]


def test_contexts_can_be_picked(database):
    store = Store.open(database)
    store_now(store, Commit(contexts=[context(2, "gpu")], latency_cells=[cell(context_id=2)]))
    store.close()
    assert {row["context"] for row in learned_rows(database, "gpu")} == {"t + d on gpu, float32"}
    with pytest.raises(
        UserError, match=r"no context contains 'tpu'; known are: t \+ d on cpu:test, float32; t \+ d on gpu"
    ):
        learned_rows(database, "tpu")


def test_an_empty_database_says_what_to_do(tmp_path):
    Store.open(tmp_path / "s.db").close()
    assert "start a worker" in run("--db", str(tmp_path / "s.db"))
    assert run("--db", str(tmp_path / "s.db"), "--json").strip() == "[]"
    assert run("--db", str(tmp_path / "s.db"), "--csv") == ""


def test_watching_follows_the_controller(database):
    store = Store.open(database)
    command = [
        sys.executable,
        "-m",
        "speclen.cli.app",
        "tables",
        "--db",
        str(database),
        "--watch",
        "--interval-s",
        "0.1",
    ]
    environment = {**os.environ, "COLUMNS": "160", "FORCE_COLOR": "1", "TERM": "xterm"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": environment}
    # A shell's background job, which the tests may be, ignores SIGINT and hands that on.
    with subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as watcher:
        assert watcher.stdout is not None
        os.set_blocking(watcher.stdout.fileno(), False)
        assert b"1,200" in read_until(watcher.stdout, b"1,200")
        store_now(store, Commit(latency_cells=[cell(2, step_s=0.016, is_best=True, num_steps=34_567)]))
        assert b"34,567" in read_until(watcher.stdout, b"34,567")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(10) == 0
    store.close()


def read_until(stream: io.BufferedReader, wanted: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 60
    while wanted not in seen and time.monotonic() < deadline:
        seen += stream.read() or b""
        time.sleep(0.02)
    return seen


def test_contradictory_flags_and_missing_files_are_refused(database, tmp_path):
    for arguments, words in [
        (["--db", str(database), "--json", "--csv"], "exclude each other"),
        (["--db", str(tmp_path / "none.db")], "There is no database at"),
        (["--db", __file__], "is damaged"),
    ]:
        result = CliRunner().invoke(app, ["tables", *arguments])
        assert isinstance(result.exception, UserError)
        assert words in str(result.exception)
