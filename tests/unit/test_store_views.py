"""The views: columns that others rely on, figures worked out by hand."""

import time
from contextlib import closing

import pytest

from speclen.store.connection import connect_reader
from speclen.store.database import Store
from speclen.store.queries import view_rows
from speclen.store.schema import Commit, PredictionRow
from tests.support.store_rows import (
    NOW,
    context,
    decision,
    estimate,
    moment,
    rows,
    store_now,
    system_sqlite_rows,
    worker,
)


def view(store: Store, name: str) -> list[dict]:
    with closing(connect_reader(store.path)) as connection:
        return view_rows(connection, name)


def test_the_learned_table_has_the_expected_figures(store):
    best = estimate(2, step_s=0.016, expected_tokens=1.6, is_best=True, source="both", updated_at=1_790_000_000.5)
    other = estimate(0, batch_min=1, batch_max=1, step_s=0.01, expected_tokens=1.0)
    gpu = context(2, "gpu", engine_fingerprint="ab12")
    store_now(store, Commit(contexts=[context(), gpu], arm_estimates=[best, other, estimate(0, context_id=2)]))
    table = view(store, "learned_table")
    assert [(row["context"], row["batch_bucket"], row["arm"]) for row in table] == [
        ("t + d on cpu:test, float32", "1", "plain"),
        ("t + d on cpu:test, float32", "3-4", "draft 2"),
        ("t + d on gpu, float32 [ab12]", "3-4", "plain"),
    ]
    figures = {"step_ms": 16.0, "ms_per_token": 10.0, "tokens_per_s": 100.0, "speedup": None, "is_equal": 1}
    as_they_are = {"expected_tokens": 1.6, "ms_per_token_low": 9.0, "num_steps": 10, "source": "both", "is_best": 1}
    assert table[1].items() >= {**figures, **as_they_are, "updated_at": "2026-09-21 14:13:20.500"}.items()


def test_current_choice_has_one_row_per_range_with_the_gain_and_the_last_reason(store):
    plain, drafted = estimate(0, step_s=0.020, expected_tokens=1.0), estimate(2, is_best=True)
    large = estimate(0, 5, 8, step_s=0.03, expected_tokens=1.0, is_best=True)
    first = decision(1, 4, reason="first", batch_min=1, batch_max=8)
    second = decision(2, 2, reason="deeper positions fail", decided_at=NOW + 1)
    rows_of = {"arm_estimates": [plain, drafted, large, estimate(2, 5, 8)], "decisions": [first, second]}
    store_now(store, Commit(contexts=[context(decision_version=2)], **rows_of))
    one, other = view(store, "current_choice")
    assert (one["batch_bucket"], one["arm"], one["reason"]) == ("3-4", "draft 2", "deeper positions fail")
    assert (one["speedup"], one["plain_ms_per_token"]) == (pytest.approx(2.0), pytest.approx(20.0))
    assert (other["batch_bucket"], other["arm"], other["reason"], other["speedup"]) == ("5-8", "plain", "first", 1.0)


def test_prediction_error_sums_the_commits_of_a_minute(store):
    minute = int(NOW // 60 * 60)
    first, second = (
        PredictionRow(1, minute, 3, 4, 1, 2.0, 0.012, 0.020),
        PredictionRow(1, minute, 3, 4, 1, 1.5, 0.020, 0.015),
    )
    store_now(store, Commit(contexts=[context()], predictions=[first]))
    store_now(store, Commit(predictions=[second, second._replace(window_start=minute + 60)]))
    row, later = view(store, "prediction_error")
    assert row["minute"] == time.strftime("%Y-%m-%d %H:%M", time.gmtime(minute))
    assert (row["batch_bucket"], row["num_steps"], later["num_steps"]) == ("3-4", 2, 1)
    assert row["predicted_ms_per_token"] == pytest.approx(35.0 / 3.5)
    assert row["observed_ms_per_token"] == pytest.approx(32.0 / 3.5)
    assert row["error_percent"] == pytest.approx(100 * (35.0 / 32.0 - 1))


@pytest.mark.parametrize(("age_s", "status"), [(0, "live"), (50, "live"), (100, "quiet"), (4000, "stale")])
def test_worker_health_shows_when_a_worker_was_last_active(store, age_s, status):
    heard = worker(12, last_seen_at=time.time() - age_s, num_reports=11, num_repeated=3, num_missing=1, num_refused=2)
    store_now(store, Commit(contexts=[context()], workers=[heard]))
    [row] = view(store, "worker_health")
    assert row["status"] == status
    assert row["seconds_since_seen"] == pytest.approx(age_s, abs=5)
    assert (row["durable_seq"], row["num_repeated"], row["num_missing"], row["num_refused"]) == (12, 3, 1, 2)


VIEWS = ["learned_table", "current_choice", "choices", "decision_history", "prediction_error", "worker_health"]


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_can_be_read_with_an_older_sqlite_as_well(store, name):
    store_now(store, moment([1], arm_estimates=[estimate(is_best=True)], decisions=[decision(1, 2)]))
    store_now(store, moment([2], predictions=[PredictionRow(1, int(NOW // 60 * 60), 1, 4, 1, 2.0, 0.01, 0.01)]))
    here = rows(store.path, f"SELECT * FROM {name}")
    there = system_sqlite_rows(store.path, f"SELECT * FROM {name}")
    assert len(here) == len(there) == 1
    if name != "worker_health":  # it tells the time
        assert here == there


def size(batch_size: int, step_s: float, plain_s: float = 0.02, num_steps: int = 9, num_plain: int = 0, **changes):
    """Estimates at one batch size: an arm in use that yields two tokens, and plain decoding."""
    best = {"is_best": True, "expected_tokens": 2.0, "ngram": True}
    return [
        estimate(2, batch_size, batch_size, step_s=step_s, num_steps=num_steps, **(best | changes)),
        estimate(0, batch_size, batch_size, step_s=plain_s, expected_tokens=1.0, num_steps=num_plain),
    ]


def choices(store: Store, *estimates: list) -> list[dict]:
    store_now(store, Commit(contexts=[context()], arm_estimates=[row for rows_of in estimates for row in rows_of]))
    return view(store, "choices")


def test_figures_of_a_range_are_means_by_the_steps_at_its_sizes_whatever_their_arm(store):
    [row] = choices(
        store, size(3, 0.020, num_steps=9), size(4, 0.018, num_steps=0, num_plain=27), size(5, 0.02, num_steps=0)
    )
    assert (row["batch_bucket"], row["arm"], row["num_steps"]) == ("3-5", "n-gram else draft 2", 36)
    assert row["ms_per_token"] == pytest.approx(0.25 * 10.0 + 0.75 * 9.0)
    assert row["speedup"] == pytest.approx(0.25 * 2.0 + 0.75 * 20 / 9)
    assert (row["ms_per_token_low"], row["ms_per_token_high"]) == pytest.approx((9.0, 11.0))


@pytest.mark.parametrize(
    ("other", "buckets"),
    [
        (size(4, 0.0245, plain_s=0.02), ["3-4"]),
        (size(4, 0.0255, plain_s=0.02), ["3", "4"]),  # 1.57 instead of 2 times faster than plain
        (size(4, 0.029, plain_s=0.029), ["3-4"]),
        (size(4, 0.031, plain_s=0.031), ["3", "4"]),  # 15.5 instead of 10 ms per token
        (size(4, 0.020, ngram=False), ["3", "4"]),
    ],
)
def test_a_range_has_one_arm_at_about_one_cost(store, other, buckets):
    assert [row["batch_bucket"] for row in choices(store, size(3, 0.020), other)] == buckets
