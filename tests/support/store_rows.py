"""Plausible rows for tests: one context, one worker, any number of reports."""

import ast
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from speclen.records import Arm
from speclen.store.connection import Connection, sqlite3
from speclen.store.database import Store, StoreConfig, open_checked
from speclen.store.files import WriterLock
from speclen.store.schema import (
    ArmEstimateRow,
    Commit,
    ContextRow,
    DecisionRow,
    ReportRow,
    StateRow,
    TrialRow,
    WorkerRow,
)
from tests.support.waiting import PATIENCE_S

NOW = float(int(time.time()))  # recent: retention deletes what is old


CONTEXT = ContextRow(
    *(1, "t", "d", "cpu:test", "float32", "", 32, 4, True), decision_version=1, created_at=NOW, updated_at=NOW
)
WORKER = WorkerRow(
    *(1, "worker-1", 7, 1, "127.0.0.1:7080", "adaptive", 32, 4, True),
    applied_seq=0,
    missing_ranges="[]",
    num_reports=0,
    num_repeated=0,
    num_missing=0,
    num_refused=0,
    registered_at=NOW,
    last_seen_at=NOW,
)
# A step of 4 sequences with `draft 2` that accepted 0, 1, 1 and 2 tokens in 20 ms.
REPORT = ReportRow(
    *(1, 1, 1, 7, 1, 4, 2, False, 0.02, "[1,2,1]", 4, 100.0, 1),
    flags="",
    probe_id=0,
    class_histograms=None,
    num_drafted_sequences=4,
    num_verified_tokens=12,
    draft_prefill_s=0.0,
    num_new_sequences=0,
    num_unobserved_sequences=0,
    evaluations=None,
    received_at=NOW,
)
ESTIMATE = ArmEstimateRow(
    *(1, 3, 4, 2, False, "draft 2", 0.016, 1.6, 9.0, 11.0, 10, None, "online"), is_best=False, updated_at=NOW
)
TRIAL = TrialRow(*(1, 1, 4.0, 3, False, 1, False, 0.2, 100.0, 40.0, 60.0, 40.0, 1.1, 0.5, 800, False, 0), ended_at=NOW)
DECISION = DecisionRow(
    *(1, 3, 4, 1, None, None, None, 2, False, "draft 2", None, 10.0), reason="a test", after_group_id=0, decided_at=NOW
)


def context(context_id: int = 1, device: str = "cpu:test", **changes: Any) -> ContextRow:
    return CONTEXT._replace(context_id=context_id, device=device, **changes)


def worker(applied_seq: int = 0, worker_key: int = 1, **changes: Any) -> WorkerRow:
    base = WORKER._replace(applied_seq=applied_seq, worker_key=worker_key, worker_id=f"worker-{worker_key}")
    return base._replace(**({"num_reports": applied_seq} | changes))


def report(seq: int, **changes: Any) -> ReportRow:
    return REPORT._replace(seq=seq, **changes)


def estimate(length: int = 2, batch_min: int = 3, batch_max: int = 4, **changes: Any) -> ArmEstimateRow:
    row = ESTIMATE._replace(speculation_length=length, batch_min=batch_min, batch_max=batch_max, **changes)
    return row._replace(arm=str(Arm(row.speculation_length, row.ngram)))


def decision(version: int, length: int, **changes: Any) -> DecisionRow:
    row = DECISION._replace(decision_version=version, speculation_length=length, **changes)
    previous = row.previous_speculation_length
    words = None if previous is None else str(Arm(previous, bool(row.previous_ngram)))
    return row._replace(arm=str(Arm(row.speculation_length, row.ngram)), previous_arm=words)


def moment(seqs: Sequence[int], **changes: Any) -> Commit:
    """A commit as the service makes it: reports, high-water mark and state agree on how many there were."""
    applied = max(seqs, default=0)
    whole = Commit(
        contexts=[context()],
        workers=[worker(applied)],
        reports=[report(seq) for seq in seqs],
        states=[StateRow(1, str(applied).encode(), NOW)],
    )
    return replace(whole, **changes)


def store_now(store: Store, commit: Commit, timeout_s: float = PATIENCE_S) -> Exception | None:
    """Submit and wait for the answer."""
    done, outcome = threading.Event(), []

    def on_done(error: Exception | None) -> None:
        outcome.append(error)
        done.set()

    store.submit(commit, on_done)
    assert done.wait(timeout_s), f"no answer from the writer: {store.health()}"
    return outcome[0]


def written(path: Path, *commits: Commit, config: StoreConfig | None = None) -> Path:
    """Add these commits to a database and close it."""
    store = Store.open(path, config)
    for commit in commits:
        assert store_now(store, commit) is None
    store.close()
    return path


def open_with_connection(path: Path, config: StoreConfig | None = None) -> tuple[Store, Connection]:
    """A store, and its connection to set SQLite's limits on."""
    lock = WriterLock(path)
    connection = open_checked(path, sys.maxsize)
    return Store(path, connection, lock, config or StoreConfig()), connection


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows as a second connection reads them while the store is open."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return [tuple(row) for row in connection.execute(query)]


def spoil_a_value(path: Path) -> None:
    """Damage one byte of a report's histogram: every page stays whole, and a CHECK constraint no longer holds."""
    content = path.read_bytes()
    assert content.count(b"[1,2,1]") >= 1
    path.write_bytes(content.replace(b"[1,2,1]", b"[1,2#1]", 1))


def spoil_a_page(path: Path) -> None:
    """Write over the first page of learned_states in a file whose WAL is empty."""
    [(page,)] = rows(path, "SELECT rootpage FROM sqlite_schema WHERE name = 'learned_states'")
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\x5a" * 4096)


def system_sqlite_rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    """The same through the SQLite that Python itself was built with, as older tools would read it.

    It runs in another process: two copies of SQLite in one process release each other's locks when one closes its file,
    and a mapping that the other still uses is then truncated, which is a bus error once in many runs.
    """
    program = "import sqlite3, sys; print(list(sqlite3.connect(sys.argv[1], uri=True).execute(sys.argv[2])))"
    arguments = [sys.executable, "-c", program, f"{path.absolute().as_uri()}?mode=ro", query]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found: list[tuple[Any, ...]] = ast.literal_eval(done.stdout)
    return found


@contextmanager
def without_write_permission(folder: Path) -> Iterator[None]:
    """Allow to read the files of a folder, and nothing else. Permissions do not bind root, which becomes another user."""
    names = [folder, *folder.iterdir()]
    for name in names:
        name.chmod(0o555 if name.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        for name in names:
            name.chmod(0o755)
