"""A small database as a controller leaves it, for tests of the verbs that read one."""

from __future__ import annotations

import json
from pathlib import Path

from store_rows import NOW, cell, context, decision, report, store_now, worker

from speclen.controller.estimator.core import ContextKey, Limits, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.store.database import Store
from speclen.store.records import AcceptanceRow, Commit, StateRow

KEY = ContextKey("t", "d", "cpu:test", "float32")


def estimator(num_steps: int = 200) -> Estimator:
    """One that has learned from steps of 4 rows at length 2."""
    controller = Estimator()
    controller.add_context(KEY, Limits(32, 4))
    steps = [StepObservation(4, 2, 0.02 + 0.0001 * (n % 7), (1, 2, 1)) for n in range(num_steps)]
    controller.observe(KEY, steps, "worker-1")
    return controller


def states(controller: Estimator) -> list[StateRow]:
    return [
        StateRow("context", "1", json.dumps(controller.export_state(KEY)), NOW),
        StateRow("pair", json.dumps(KEY.pair), json.dumps(controller.export_pair_state(KEY.pair)), NOW),
    ]


def write_database(path: Path, **worker_changes: float) -> Path:
    """Two buckets; in bucket 3-4 length 2 is in use and twice as fast as plain decoding."""
    cells = [
        cell(0, 1, 2, step_s=0.010, expected_tokens=1.0, is_best=True, num_steps=7, source="both"),
        cell(2, 1, 2, step_s=0.024, expected_tokens=1.6, num_steps=0, source="prior"),
        cell(0, step_s=0.020, expected_tokens=1.0, num_steps=0, source="profile"),
        cell(2, step_s=0.016, expected_tokens=1.6, is_best=True, num_steps=1200),
    ]
    store = Store.open(path)
    commit = Commit(
        contexts=[context()],
        workers=[worker(3, **worker_changes)],
        latency_cells=cells,
        acceptance=[AcceptanceRow("t", "d", 0, 0, 1, 0.75, 100.0, NOW)],
        states=states(estimator()),
        decisions=[decision(1, 2)],
    )
    assert store_now(store, commit) is None
    assert store_now(store, Commit(reports=[report(1), report(2), report(3)])) is None
    store.close()
    return path
