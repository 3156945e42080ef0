"""The promise: a report acknowledged as durable is never lost and never counted twice, whatever dies.

A real controller is killed with SIGKILL at random moments (also while it starts) and at every failpoint of its writer,
while three workers report in two pairs of models, repeat groups and let them overtake each other. In the end, all that
was reported must be on the disk once, and the learned tables must equal a replay of the stored reports.

`scripts/chaos` kills more often.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speclen.store.database import Store
from speclen.store.failpoints import FAILPOINTS, Failpoints
from tests.support.kill_checks import check
from tests.support.kill_harness import Lane
from tests.support.store_rows import moment, rows, store_now

NUM_RANDOM_KILLS = 4


def test_nothing_acknowledged_is_lost_or_counted_twice(tmp_path):
    lane = Lane(tmp_path / "lane", seed=1)
    # Reached by every commit. The one left out needs a shrinking file, and has a test of its own below.
    names = [name for name in FAILPOINTS if name != "after_vacuum"]
    lane.run([f"{name}:{lane.dice.randint(1, 6)}" for name in names], NUM_RANDOM_KILLS)
    check(lane)
    assert lane.num_kills == len(names) + NUM_RANDOM_KILLS


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
