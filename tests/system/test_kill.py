"""The promise: a report acknowledged as durable is never lost and never counted twice, whatever dies.

A real controller is killed with SIGKILL at random moments (also while it starts) and at every failpoint of its writer,
while three workers report in two pairs of models, repeat groups and let them overtake each other. In the end, all that
was reported must be on the disk once, and the learned tables must equal a replay of the stored reports.

`pytest tests/test_kill.py --kills 5000` kills more often.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kill_harness import EPOCH, Lane, step_report
from store_rows import moment, report, rows, store_now

from speclen.controller.estimator import Estimator
from speclen.controller.wire.stored import groups_of
from speclen.records import ContextKey, Limits
from speclen.store.connection import connect_reader
from speclen.store.database import Store, StoreConfig
from speclen.store.failpoints import FAILPOINTS, Failpoints
from speclen.store.queries import contexts, stored_reports, view_rows, workers
from speclen.store.records import ContextRow, ReportRow
from speclen.store.retention import Retention

# Reached by every commit. The one left out needs a shrinking file, and has a test of its own below.
COMMIT_FAILPOINTS = [name for name in FAILPOINTS if name != "after_vacuum"]
NUM_LANES = 2


@pytest.mark.timeout(0)
def test_nothing_acknowledged_is_lost_or_counted_twice(tmp_path, request):
    num_kills = request.config.getoption("--kills")
    per_lane = num_kills // NUM_LANES
    lanes = [Lane(tmp_path / f"lane-{number}", seed=number) for number in range(1, NUM_LANES + 1)]
    failures: list[BaseException] = []

    def run(lane: Lane) -> None:
        try:
            repeats = max(1, per_lane // (3 * len(COMMIT_FAILPOINTS)))
            failpoints = [f"{name}:{lane.dice.randint(1, 6)}" for name in COMMIT_FAILPOINTS * repeats]
            lane.run(failpoints, max(0, per_lane - len(failpoints)))
        except BaseException as error:
            failures.append(error)
            for other in lanes:
                other.aborted = True

    threads = [threading.Thread(target=run, args=(lane,), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    give_up_at = time.monotonic() + 120 + 3 * num_kills  # some six times what it takes on two quiet cores
    for thread in threads:
        thread.join(max(0.0, give_up_at - time.monotonic()))
        assert not thread.is_alive() or failures, f"stuck after {[lane.num_kills for lane in lanes]} kills"
    if failures:
        raise failures[0]
    for lane in lanes:
        check(lane)
    print(summary(lanes))


def check(lane: Lane) -> None:
    """Everything reported is stored once and as it was, and the tables are what a replay of the rows gives."""
    assert lane.worker_failures == []
    complaints = re.findall(r'.*(?:"level": "(?:error|critical)"|Traceback).*', lane.log.read_text())
    assert complaints == [], "a controller complained"
    assert rows(lane.database, "PRAGMA integrity_check") == [("ok",)]
    assert rows(lane.database, "PRAGMA foreign_key_check") == []
    for worker in lane.workers:
        assert worker.broken_promises == []
        assert worker.num_repeated > 0
        assert worker.num_overtaken > 0
        assert worker.num_acknowledged == worker.last_seq
    connection = connect_reader(lane.database)
    stored = list(stored_reports(connection))
    for worker in lane.workers:
        check_reports(lane.database, worker.number, worker.last_seq, stored)
    names = {worker.worker_key: worker.worker_id for worker in workers(connection)}
    check_replay(contexts(connection), names, stored, view_rows(connection, "learned_table"))
    connection.close()


def check_reports(database: Path, number: int, last_seq: int, stored: list[ReportRow]) -> None:
    query = (
        f"SELECT worker_key, applied_seq, num_reports, missing_ranges FROM workers WHERE worker_id = 'worker-{number}'"
    )
    [(worker_key, applied_seq, num_reports, missing)] = rows(database, query)
    mine = [row for row in stored if row.worker_key == worker_key]
    assert sorted(row.seq for row in mine) == list(range(1, last_seq + 1)), "lost or counted twice"
    assert (applied_seq, num_reports, missing) == (last_seq, last_seq, "[]")
    for row in mine:
        sent = step_report(number, row.seq)
        assert row.epoch == EPOCH
        assert (row.batch_size, row.latency_s) == (sent.batch_size, sent.latency_s)
        assert json.loads(row.accepted_histogram) == list(sent.accepted_histogram)


def check_replay(
    known: tuple[ContextRow, ...], names: dict[int, str], stored: list[ReportRow], table: list[dict]
) -> None:
    """A fresh estimator that makes the same calls as the controller did must end up with the same table."""
    estimator = Estimator()
    keys = {}
    for row in known:
        keys[row.context_id] = ContextKey(row.target, row.draft, row.device, row.dtype, row.engine_fingerprint)
        estimator.add_context(keys[row.context_id], Limits(row.max_batch_size, row.max_speculation_length, row.ngram))
    for group in groups_of(sorted(stored, key=lambda row: row.group_id)):  # stable: rows of a group stay in order
        estimator.observe(keys[group.context_id], group.steps, names[group.worker_key])
    expected = [
        (context_id, row.batch_min, str(row.arm), row.num_steps, row.expected_tokens, 1000 * row.step_s, row.is_best)
        for context_id, key in keys.items()
        for row in sorted(estimator.rows(key), key=lambda row: (row.batch_min, row.arm.ngram, row.arm))
    ]
    columns = ("context_id", "batch_min", "arm", "num_steps", "expected_tokens", "step_ms", "is_best")
    assert [tuple(row[name] for name in columns) for row in table] == expected


def summary(lanes: list[Lane]) -> str:
    starts = sorted(start for lane in lanes for start in lane.start_times_s)
    kills: dict[str, int] = {}
    for lane in lanes:
        for where, count in lane.kills_at.items():
            kills[where] = kills.get(where, 0) + count
    workers = [worker for lane in lanes for worker in lane.workers]
    return (
        f"{sum(kills.values())} kills ({', '.join(f'{count} {where}' for where, count in sorted(kills.items()))}); "
        f"{sum(worker.num_acknowledged for worker in workers)} reports acknowledged, "
        f"{sum(worker.num_repeated for worker in workers)} repeated, "
        f"{sum(worker.num_overtaken for worker in workers)} overtaken: 0 lost, 0 counted twice; "
        f"serving after {statistics.median(starts):.2f} s (median), {starts[-1]:.2f} s (longest)"
    )


def write_until_killed(path: Path, failpoint: str) -> int:
    """Let a process of its own delete most of a file's reports and give the space back; returns its exit code."""
    script = "import sys, test_kill; test_kill.shrink(sys.argv[1])"
    environment = {**os.environ, "SPECLEN_FAILPOINT": failpoint, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script, str(path)], env=environment, check=False).returncode


def shrink(path: str) -> None:
    store = Store.open(path, StoreConfig(retention=Retention(max_report_rows=10)))
    first = store.load().workers[0].applied_seq + 1
    for seq in range(first, first + 100):
        store_now(store, moment([seq], reports=[report(seq)]))
    store.close()


def test_a_kill_while_space_is_given_back_leaves_a_sound_file(tmp_path):
    path = tmp_path / "s.db"
    store = Store.open(path)
    store_now(store, moment(range(1, 140_001)))
    store.close()
    for count in (1, 2):
        assert write_until_killed(path, f"after_vacuum:{count}") == -9
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    store = Store.open(path)
    newest = store.load().workers[0].applied_seq
    store.close()
    assert rows(path, "SELECT max(seq) FROM step_reports") == [(newest,)]


def test_an_unknown_failpoint_is_refused():
    with pytest.raises(ValueError, match=r"'after_lunch'; known are: before_begin"):
        Failpoints("after_lunch:2")
