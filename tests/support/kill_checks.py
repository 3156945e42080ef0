"""Checks of a database whose controller was killed again and again, against what its workers sent."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

from speclen.cli.learned.history import estimates_of, events
from speclen.controller.analysis.replay import replay
from speclen.store.connection import Connection, connect_reader
from speclen.store.queries import contexts, stored_reports
from speclen.store.records import ReportRow
from tests.support.kill_harness import EPOCH, Lane, step_report
from tests.support.store_rows import rows


def check(lane: Lane) -> None:
    """Every report is stored once and as it was sent, and the learned tables equal a replay of the rows."""
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
    with closing(connect_reader(lane.database)) as connection:
        stored = list(stored_reports(connection))
        for worker in lane.workers:
            check_reports(lane.database, worker.number, worker.last_seq, stored)
        check_replay(connection)


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


def check_replay(connection: Connection) -> None:
    """A fresh estimator that makes the same calls as the controller did ends up with the same table."""
    again = replay(events(connection)).estimator
    for row in contexts(connection):
        found, expected = estimates_of(connection, row.context_id), again.rows(row.key)
        assert [each._replace(ms_per_token=0.0) for each in found] == [
            each._replace(ms_per_token=0.0)
            for each in sorted(expected, key=lambda each: (each.batch_min, each.arm[::-1]))
        ]
