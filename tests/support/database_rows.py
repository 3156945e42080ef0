"""A small database as a controller leaves it, for tests of the verbs that read one."""

import subprocess
import sys
from pathlib import Path

from speclen.store.schema import AcceptanceRow, Commit, ContextLimitsRow, PredictionRow, StateRow
from tests.support.store_rows import NOW, context, decision, estimate, report, worker, written


def write_database(path: Path, state: bytes = b"PK", **worker_changes: float) -> Path:
    """Two ranges of batch sizes; at 3-4 `draft 2` is in use and twice as fast as plain decoding."""
    estimates = [
        estimate(0, 1, 2, step_s=0.010, expected_tokens=1.0, is_best=True, num_steps=7, source="both"),
        estimate(2, 1, 2, step_s=0.024, expected_tokens=1.6, num_steps=0, source="prior"),
        estimate(0, step_s=0.020, expected_tokens=1.0, num_steps=0, source="profile"),
        estimate(2, step_s=0.016, expected_tokens=1.6, is_best=True, num_steps=1200, observed_step_s=0.017),
    ]
    commit = Commit(
        contexts=[context()],
        context_limits=[ContextLimitsRow(1, 32, 4, True, "[]", 0, NOW)],
        workers=[worker(3, **worker_changes)],
        arm_estimates=estimates,
        acceptance=[AcceptanceRow(1, 1, 0.75, 100.0, NOW)],
        states=[StateRow(1, state, NOW)],
        decisions=[decision(1, 2)],
    )
    observed = PredictionRow(1, int(NOW // 60 * 60), 3, 4, 3, 6.0, 0.060, 0.060)
    return written(path, commit, Commit(reports=[report(1), report(2), report(3)], predictions=[observed]))


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[2])
from speclen.store.database import Store
from tests.support.store_rows import moment, store_now
assert store_now(Store.open(sys.argv[1]), moment([1, 2])) is None
os._exit(0)
"""


def write_killed_database(path: Path) -> Path:
    """A database as a killed controller leaves it: only the WAL holds its two reports."""
    subprocess.run([sys.executable, "-c", KILLED, path, Path(__file__).parents[2]], check=True)
    assert path.with_name(path.name + "-wal").stat().st_size > 0
    return path
