"""Kills: of a controller at every step of a commit, of one whose worker serves, and while space goes back to the disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from chaos.fault import Place, until
from chaos.fleet import Fleet, check_database
from chaos.kills import kill_controller
from chaos.load import Load
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.store.database import Store
from tests.support.store_rows import moment, rows, written


def place(folder: Path) -> Place:
    """For as few rounds as a fault has."""
    return Place(folder, 0.0, random.Random(5))


def test_what_is_acknowledged_survives_every_kill_and_counts_once(tmp_path):
    """Killed at every step of a commit, at random moments and while it starts; a replay repeats its decisions."""
    kill_controller(place(tmp_path))
    asked = CliRunner().invoke(app, ["replay", "--db", str(tmp_path / "speclen.db"), "--json"])
    replayed = json.loads(asked.stdout)
    assert replayed["exact"], replayed
    assert replayed["num_reports"] == rows(tmp_path / "speclen.db", "SELECT count(*) FROM step_reports")[0][0]
    assert replayed["num_stored"] > 2


def test_a_worker_serves_on_without_its_controller_and_loses_no_report(tmp_path):
    """While it stands still, and when it was killed. Every token is the target's own, and every step on disk, once."""
    with Fleet(place(tmp_path)) as fleet:
        controller, [worker] = fleet.controller, fleet.workers
        with Load([worker.address], 4, seed=1) as load:
            for end in (signal.SIGSTOP, signal.SIGKILL):
                controller.send(end)
                served = load.codes["OK"]
                until(lambda served=served: load.codes["OK"] > served + 8, "an answer without a controller")
            controller.wait()
            controller.start()
            controller.wait_until_serving()
        fleet.wait_until_told()
        assert check_database(fleet.database) == worker.info().num_steps > 0
        assert worker.info().num_reports_dropped == 0


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
    path = written(tmp_path / "s.db", moment(range(1, 140_001)))
    for count in (1, 2):
        assert write_until_killed(path, f"after_vacuum:{count}") == -9
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    store = Store.open(path)
    newest = store.load().workers[0].applied_seq
    store.close()
    assert rows(path, "SELECT max(seq) FROM step_reports") == [(newest,)]
