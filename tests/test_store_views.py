"""The views: columns that others rely on, figures worked out by hand."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from store_rows import NOW, cell, context, decision, moment, report, rows, store_now, system_sqlite_rows, worker

from speclen.store.connection import connect_reader
from speclen.store.database import Store
from speclen.store.queries import view_rows
from speclen.store.records import Commit

LEARNED_TABLE_COLUMNS = [
    *("context", "batch_bucket", "batch_min", "batch_max", "speculation_length", "expected_tokens", "step_ms"),
    *("ms_per_token", "tokens_per_s", "ms_per_token_low", "ms_per_token_high", "num_steps", "source", "is_best"),
    "updated_at",
]


@pytest.fixture
def store(tmp_path):
    store = Store.open(tmp_path / "s.db")
    yield store
    store.close()


def view(store: Store, name: str) -> list[dict]:
    connection = connect_reader(store.path)
    try:
        return view_rows(connection, name)
    finally:
        connection.close()


def test_learned_table_has_exactly_the_columns_of_the_contract(store):
    names = [row[0] for row in rows(store.path, "SELECT name FROM pragma_table_info('learned_table')")]
    assert names == [*LEARNED_TABLE_COLUMNS, "observed_step_ms", "num_reports_since"]


def test_learned_table_by_hand(store):
    best = cell(2, step_s=0.016, expected_tokens=1.6, is_best=True, source="both", updated_at=1_790_000_000.5)
    other = cell(0, batch_min=1, batch_max=1, step_s=0.01, expected_tokens=1.0)
    gpu = context(2, "gpu", engine_fingerprint="ab12")
    store_now(store, Commit(contexts=[context(), gpu], latency_cells=[best, other, cell(0, context_id=2)]))
    table = view(store, "learned_table")
    assert [(row["context"], row["batch_bucket"], row["speculation_length"]) for row in table] == [
        ("t + d on cpu:test, float32", "1", 0),
        ("t + d on cpu:test, float32", "3-4", 2),
        ("t + d on gpu, float32 [ab12]", "3-4", 0),
    ]
    assert table[1] == {
        "context": "t + d on cpu:test, float32",
        "batch_bucket": "3-4",
        "batch_min": 3,
        "batch_max": 4,
        "speculation_length": 2,
        "expected_tokens": 1.6,
        "step_ms": 16.0,
        "ms_per_token": 10.0,
        "tokens_per_s": 100.0,
        "ms_per_token_low": 9.0,
        "ms_per_token_high": 11.0,
        "num_steps": 10,
        "source": "both",
        "is_best": 1,
        "updated_at": "2026-09-21 14:13:20.500",
        "observed_step_ms": None,
        "num_reports_since": None,
    }


def test_current_choice_has_one_row_per_bucket_with_the_gain_and_the_last_reason(store):
    cells = [cell(0, step_s=0.020, expected_tokens=1.0), cell(2, step_s=0.016, expected_tokens=1.6, is_best=True)]
    cells += [cell(0, 5, 8, step_s=0.03, expected_tokens=1.0, is_best=True), cell(2, 5, 8)]
    changes = [decision(1, 4, reason="first"), decision(2, 2, reason="deeper positions fail", decided_at=NOW + 1)]
    store_now(store, Commit(contexts=[context(decision_version=2)], latency_cells=cells, decisions=changes))
    small, large = view(store, "current_choice")
    assert (small["batch_bucket"], small["speculation_length"], small["reason"]) == ("3-4", 2, "deeper positions fail")
    assert small["speedup"] == pytest.approx(2.0)
    assert small["plain_ms_per_token"] == pytest.approx(20.0)
    assert (large["batch_bucket"], large["speculation_length"], large["reason"]) == ("5-8", 0, None)
    assert large["speedup"] == 1.0


def test_decision_history_is_newest_first_with_both_estimates(store):
    second = decision(2, 0, previous_length=2, previous_ms_per_token=12.0, ms_per_token=11.0, plan="copy>=3 up to 8")
    store_now(store, Commit(contexts=[context()], decisions=[decision(1, 2), second]))
    newest, oldest = view(store, "decision_history")
    assert (newest["previous_length"], newest["speculation_length"]) == (2, 0)
    assert (newest["previous_ms_per_token"], newest["ms_per_token"]) == (12.0, 11.0)
    assert (oldest["previous_length"], oldest["decision_version"]) == (None, 1)
    assert (newest["previous_plan"], newest["plan"], oldest["plan"]) == (None, "copy>=3 up to 8", None)


def test_prediction_error_compares_reports_with_the_estimates_that_came_before_them(store):
    """Predicted 16 ms for 1.6 tokens; observed (12 + 20) ms for (1 + 4/4) + (1 + 2/4) tokens per row."""
    store_now(store, Commit(contexts=[context()], workers=[worker()], latency_cells=[cell(2)]))
    minute = NOW // 60 * 60
    reports = [
        report(1, latency_s=0.012, received_at=minute),
        report(2, latency_s=0.020, accepted_histogram="[2,2,0]", num_accepted_tokens=2, received_at=minute + 59.9),
        report(3, latency_s=3.0, flags="prefill", received_at=minute + 1),  # must not teach, so it does not count
        report(4, latency_s=3.0, batch_size=9, num_accepted_tokens=0, received_at=minute + 1),  # no estimate yet
    ]
    hindsight = cell(2, step_s=0.5)  # of the same commit as the reports: knows them, so it is no prediction
    store_now(store, moment([4], reports=reports, latency_cells=[hindsight]))
    [row] = view(store, "prediction_error")
    assert row["minute"] == time.strftime("%Y-%m-%d %H:%M", time.gmtime(minute))
    assert (row["batch_bucket"], row["num_steps"]) == ("3-4", 2)
    assert row["predicted_ms_per_token"] == pytest.approx(10.0)
    assert row["observed_ms_per_token"] == pytest.approx(32.0 / 3.5)
    assert row["error_percent"] == pytest.approx(100 * (10.0 / (32.0 / 3.5) - 1))


def test_prediction_error_leaves_out_what_prompts_take(store):
    """Story: a load of short answers was a fifth faster than promised, for ever."""
    cells = [cell(2, bare_step_s=0.01)]
    assert store_now(store, Commit(contexts=[context()], workers=[worker()], latency_cells=cells)) is None
    assert store_now(store, moment([1])) is None
    [(predicted,)] = rows(store.path, "SELECT sum_predicted_step_s FROM prediction_windows")
    assert predicted == pytest.approx(0.01)


def test_prediction_error_adds_up_over_commits_and_lengths_of_a_minute(store):
    store_now(store, Commit(contexts=[context()], workers=[worker()], latency_cells=[cell(2), cell(1, step_s=0.032)]))
    for seq, length in [(1, 2), (2, 1), (3, 2)]:
        store_now(store, moment([seq], reports=[report(seq, speculation_length=length)]))
    [row] = view(store, "prediction_error")
    assert row["num_steps"] == 3
    assert row["predicted_ms_per_token"] == pytest.approx(1000 * (0.016 + 0.032 + 0.016) / (3 * 1.6))
    assert row["observed_ms_per_token"] == pytest.approx(1000 * 0.06 / 6.0)


@pytest.mark.parametrize(("age_s", "status"), [(0, "live"), (50, "live"), (100, "quiet"), (4000, "stale")])
def test_worker_health_says_when_a_worker_was_last_heard(store, age_s, status):
    heard = worker(12, last_seen_at=time.time() - age_s, num_reports=11, num_repeated=3, num_missing=1, num_refused=2)
    store_now(store, Commit(contexts=[context()], workers=[heard]))
    [row] = view(store, "worker_health")
    assert row["status"] == status
    assert row["seconds_since_seen"] == pytest.approx(age_s, abs=5)
    assert (row["durable_seq"], row["num_repeated"], row["num_missing"], row["num_refused"]) == (12, 3, 1, 2)


VIEWS = ["learned_table", "current_choice", "decision_history", "prediction_error", "worker_health"]


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_can_be_read_with_an_older_sqlite_as_well(store, name):
    store_now(
        store,
        moment([1], latency_cells=[cell(is_best=True)], decisions=[decision(1, 2)]),
    )
    store_now(store, moment([2], reports=[report(2)]))
    here = rows(store.path, f"SELECT * FROM {name}")
    there = system_sqlite_rows(store.path, f"SELECT * FROM {name}")
    assert len(here) == len(there) == 1
    if name != "worker_health":  # it tells the time
        assert here == there


def test_choices_by_hand_and_in_100_columns(store):
    """The view of the first minute: `sqlite-utils rows … learned_table --table` is 310 columns wide."""
    long = context(2, "gpu", target="Llama-3.1-405B-Instruct-FP8#0123abcd", draft="Llama-3.2-1B-Instruct#0123abcd")
    cells = [cell(0, step_s=0.01, expected_tokens=1.0), cell(2, step_s=0.016, expected_tokens=3.2, is_best=True)]
    cells.append(cell(1, context_id=2, batch_min=1, batch_max=4096, num_steps=10**9, is_best=True))
    store_now(store, Commit(contexts=[context(), long], latency_cells=cells))
    first, second = view(store, "choices")
    assert first == {
        "context": 1,
        "models": "t + d",
        "batch": "3-4",
        "length": 2,
        "ms_per_token": 5.0,
        "speedup": 2.0,
        "num_steps": first["num_steps"],
    }
    assert second["models"].startswith("Llama-3.1-405B-Instruct-FP8 + ")
    assert second["speedup"] is None
    shown = subprocess.run(
        [sys.executable, "-m", "sqlite_utils", "rows", str(store.path), "choices", "--table"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert max(map(len, shown.splitlines())) <= 100, shown
