"""Reports acknowledged as durable survive kills of the controller. Kills at every step of a commit: scripts/chaos."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from chaos.fault import Place
from chaos.kills import kill_along, kill_controller_under_load
from typer.testing import CliRunner

from speclen.cli.app import app
from speclen.store.database import Store
from tests.support.store_rows import moment, rows, written

SHRINK = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.support.doomed import doom
from tests.support.store_rows import moment, report, store_now
from speclen.store.database import Store, StoreConfig
from speclen.store import retention
retention.VACUUM_ABOVE_PAGES, retention.VACUUM_PAGES = 50, 25
doom()
store = Store.open(sys.argv[1], StoreConfig(retention=retention.Retention(max_report_rows=10)))
first = store.load().workers[0].applied_seq + 1
for seq in range(first, first + 100):
    store_now(store, moment([seq], reports=[report(seq)]))
"""


def test_a_kill_while_space_is_given_back_leaves_a_sound_file(tmp_path):
    """Another process deletes most of a file's reports and returns the space."""
    path = written(tmp_path / "s.db", moment(range(1, 14_001)))
    command = [sys.executable, "-c", SHRINK, str(path), str(Path(__file__).parents[2])]
    for count in (1, 2):
        environment = {**os.environ, "KILL_AT": f"PRAGMA incremental_vacuum:{count}"}
        assert subprocess.run(command, env=environment, check=False).returncode == -9
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
    store = Store.open(path)
    newest = store.load().workers[0].applied_seq
    store.close()
    assert rows(path, "SELECT max(seq) FROM step_reports") == [(newest,)]


def test_acknowledged_reports_survive_every_kill_and_count_once(tmp_path):
    plan = ["COMMIT:2", "", "INSERT INTO step_reports:3", "", "RELEASE:1"]
    assert kill_along(Place(tmp_path, 0.0, random.Random(5)), plan) > 100
    replayed = json.loads(CliRunner().invoke(app, ["replay", "--db", str(tmp_path / "speclen.db"), "--json"]).stdout)
    assert replayed["exact"], replayed
    assert replayed["num_stored"] > 2


def test_workers_serve_through_kills_of_their_controller_and_lose_no_report(tmp_path):
    """Every answer is the target's own, as transformers generates it."""
    kill_controller_under_load(Place(tmp_path, 0.0, random.Random(5)))
