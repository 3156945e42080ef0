"""The promise: a report acknowledged as durable is never lost and never counted twice, whatever dies.

A real controller is killed with SIGKILL at random moments (also while it starts) and at every failpoint of its writer,
while three workers report in two pairs of models, repeat groups and let them overtake each other. In the end, all that
was reported must be on the disk once, and the learned tables must equal a replay of the stored reports.

`pytest tests/system/test_kill.py --kills 5000` kills more often.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from speclen.store.database import Store
from speclen.store.failpoints import FAILPOINTS, Failpoints
from tests.support.kill_checks import check
from tests.support.kill_harness import Lane
from tests.support.store_rows import moment, rows, store_now

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


SHRINK = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.support.store_rows import moment, report, store_now
from speclen.store.database import Store, StoreConfig
from speclen.store.retention import Retention
store = Store.open(sys.argv[1], StoreConfig(retention=Retention(max_report_rows=10)))
first = store.load().workers[0].applied_seq + 1
for seq in range(first, first + 100):
    store_now(store, moment([seq], reports=[report(seq)]))
"""


def write_until_killed(path: Path, failpoint: str) -> int:
    """Let a process of its own delete most of a file's reports and give the space back; returns its exit code."""
    command = [sys.executable, "-c", SHRINK, str(path), str(Path(__file__).parents[2])]
    return subprocess.run(command, env={**os.environ, "SPECLEN_FAILPOINT": failpoint}, check=False).returncode


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
