"""The file stays bounded: rows beyond a number or an age go, the newest stays, and space goes back to the disk."""

import json
import time

from speclen.store import retention
from speclen.store.database import Store, StoreConfig
from speclen.store.retention import Retention
from speclen.store.schema import Commit, PredictionRow
from tests.support.store_rows import NOW, context, decision, moment, report, rows, store_now, written

DAY = 86400.0


def open_with(path, **changes) -> Store:
    return Store.open(path, StoreConfig(retention=Retention(**changes)))


def test_the_number_of_reports_is_bounded_and_the_newest_are_kept(tmp_path):
    store = open_with(tmp_path / "s.db", max_report_rows=100)
    for first in range(1, 1001, 50):
        store_now(store, moment(range(first, first + 50)))
        assert rows(store.path, "SELECT count(*) <= 100, max(seq) FROM step_reports") == [(1, first + 49)]
    assert rows(store.path, "SELECT count(*), min(seq) FROM step_reports") == [(100, 901)]
    store.close()


def test_reports_that_hold_too_much_do_not_fill_the_disk(tmp_path, monkeypatch):
    """Story: with evaluations a row may take 32 kB instead of 80 bytes, and five million rows took 160 GB."""
    monkeypatch.setattr(retention, "BYTES_BESIDE_REPORTS", 2_000_000)
    monkeypatch.setattr(retention, "CHUNK_ROWS", 50)
    monkeypatch.setattr(retention, "FEWEST_ROWS", 100)
    store = open_with(tmp_path / "s.db", max_report_rows=10_000)
    store_now(store, moment(range(1, 201)))
    for first in range(201, 2001, 100):
        seqs = range(first, first + 100)
        store_now(store, moment(seqs, reports=[report(seq, evaluations=json.dumps("f" * 32_000)) for seq in seqs]))
    assert store.path.stat().st_size < 2 * Retention(max_report_rows=10_000).max_bytes
    assert rows(store.path, "SELECT max(seq), count(*) > 100 FROM step_reports") == [(2000, 1)], (
        "no more go than have to"
    )
    store.close()


def test_old_reports_are_deleted_but_the_newest_stays(tmp_path):
    store = open_with(tmp_path / "s.db", max_days=2)
    old = [report(seq, group_id=seq, received_at=NOW - 3 * DAY) for seq in range(1, 11)]
    store_now(store, moment([10], reports=old))
    assert rows(store.path, "SELECT seq FROM step_reports") == [(10,)]
    assert store.load().last_group_id == 10
    store_now(store, moment([11], reports=[report(11, group_id=11)]))
    assert rows(store.path, "SELECT seq, report_id FROM step_reports") == [(11, 11)]
    store.close()


def test_minutes_of_prediction_error_expire(store, monkeypatch):
    monkeypatch.setattr(retention, "PREDICTION_DAYS", 2.0)
    minutes = [int(NOW - days * DAY) // 60 * 60 for days in (3, 1, 0)]
    predictions = [PredictionRow(1, minute, 1, 1, 1, 2.0, 0.01, 0.01) for minute in minutes]
    store_now(store, moment([1], predictions=predictions))
    kept = [row[0] for row in rows(store.path, "SELECT window_start FROM prediction_windows ORDER BY 1")]
    assert kept == minutes[1:]


def test_events_are_bounded_too(store, monkeypatch):
    monkeypatch.setattr(retention, "MAX_EVENT_ROWS", 5)
    decisions = [decision(version, 2) for version in range(1, 21)]
    store_now(store, Commit(contexts=[context()], decisions=decisions))
    assert [row[0] for row in rows(store.path, "SELECT decision_version FROM decisions")] == [16, 17, 18, 19, 20]


def test_space_is_returned_to_the_disk_when_much_of_the_file_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "VACUUM_ABOVE_PAGES", 50)
    monkeypatch.setattr(retention, "VACUUM_PAGES", 25)
    count = 14_000
    before = written(tmp_path / "s.db", moment(range(1, count + 1))).stat().st_size
    assert before > 3 * 50 * 4096
    store = open_with(tmp_path / "s.db", max_report_rows=10)
    for seq in range(count + 1, count + 101):
        store_now(store, moment([seq], reports=[report(seq)]))
    store.close()
    free = rows(store.path, "PRAGMA freelist_count")[0][0]
    assert free < max(50, 0.25 * store.path.stat().st_size / 4096)
    assert store.path.stat().st_size < before / 2
    assert rows(store.path, "PRAGMA integrity_check") == [("ok",)]


def test_a_corrected_clock_does_not_expire_new_reports(tmp_path, monkeypatch):
    """Story: every commit deleted all reports but the newest, until the controller was restarted."""
    right = time.time()
    monkeypatch.setattr(time, "time", lambda: right + 400 * 86400)
    store = Store.open(tmp_path / "s.db")
    monkeypatch.setattr(time, "time", lambda: right)
    for seq in (1, 2, 3):
        commit = moment([seq])
        commit.reports = [report._replace(received_at=right) for report in commit.reports]
        assert store_now(store, commit) is None
    store.close()
    assert rows(tmp_path / "s.db", "SELECT seq FROM step_reports") == [(1,), (2,), (3,)]
