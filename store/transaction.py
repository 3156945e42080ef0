"""One commit: everything of a batch in one transaction, in an order that keeps references whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from speclen.store import statements
from speclen.store.batch import Batch
from speclen.store.connection import Connection
from speclen.store.failpoints import Failpoints
from speclen.store.prediction import add_predictions
from speclen.store.records import ProfileRow
from speclen.store.retention import Retention, enforce_retention


def write(connection: Connection, batch: Batch, retention: Retention, failpoints: Failpoints) -> list[str]:
    """Store a batch in one transaction; returns why single rows were refused.

    Raises what SQLite raises (disk full, damaged file, ...) after rolling everything back.
    """
    failpoints.reach("before_begin")
    connection.execute("BEGIN IMMEDIATE")
    try:
        refusals = _write_rows(connection, batch, failpoints)
        enforce_retention(connection, retention, len(batch.reports), time.time())
        failpoints.reach("after_retention")
        _write_store_events(connection, batch, refusals)
        failpoints.reach("before_commit")
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some errors.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    failpoints.reach("after_commit")
    return refusals


def _write_rows(connection: Connection, batch: Batch, failpoints: Failpoints) -> list[str]:
    failpoints.reach("after_begin")
    refusals = _insert(statements.CONTEXTS, connection, batch.contexts.values())
    refusals += _insert(statements.WORKERS, connection, batch.workers.values())
    failpoints.reach("after_workers")
    refusals += _insert_profiles(connection, batch.profiles)
    bad_reports = statements.REPORTS.run(connection, batch.reports)
    failpoints.reach("after_reports")
    if not bad_reports:  # whose sums would be bad as well
        add_predictions(connection, batch.reports)  # before the new estimates replace those that made the prediction
    refusals += bad_reports
    failpoints.reach("after_predictions")
    for context_id in batch.replaced_contexts:
        connection.execute("DELETE FROM latency_cells WHERE context_id = ?", (context_id,))
    refusals += _insert(statements.LATENCY_CELLS, connection, batch.latency_cells.values())
    refusals += _insert(statements.ACCEPTANCE, connection, batch.acceptance.values())
    refusals += _insert(statements.STATES, connection, batch.states.values())
    refusals += _insert(statements.DECISIONS, connection, batch.decisions)
    refusals += _insert(statements.DRIFT_EVENTS, connection, batch.drift_events)
    failpoints.reach("after_estimates")
    return refusals


def _insert(insert: statements.Insert, connection: Connection, rows: Iterable[object]) -> list[str]:
    return insert.run(connection, map(insert.as_values, rows))


def _insert_profiles(connection: Connection, profiles: list[ProfileRow]) -> list[str]:
    refusals = []
    for profile in profiles:
        values = dict(zip(statements.PROFILES.columns, statements.PROFILES.as_values(profile), strict=True))
        values |= {name: json.dumps(values[name]) for name in ("survival", "num_survival_rows")}
        values["as_prior"] = int(profile.as_prior)
        refusals += statements.PROFILES.run(connection, [tuple(values.values())])
        cells = ((profile.profile_id, *statements.PROFILE_CELL_VALUES(cell)) for cell in profile.cells)
        refusals += statements.PROFILE_CELLS.run(connection, cells)
    return refusals


def _write_store_events(connection: Connection, batch: Batch, refusals: list[str]) -> None:
    """Leave a trace of what this commit had to give up."""
    events = []
    if batch.num_reports_dropped:
        detail = "commits failed for longer than memory allows; the estimates contain these reports"
        events.append(("reports_dropped", batch.num_reports_dropped, detail, time.time()))
    if refusals:
        events.append(("rows_refused", len(refusals), refusals[0], time.time()))
    statements.STORE_EVENTS.run(connection, events)
