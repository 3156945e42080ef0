"""One commit: everything of a batch in one transaction, in an order that keeps references whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from store import statements
from store.batch import Batch
from store.connection import Connection
from store.failpoints import Failpoints
from store.records import ProfileRow
from store.retention import Retention, enforce_retention

# Sums, per minute and cell, what the estimates on disk say of the reports just inserted, beside what these took.
# Grouped before the join, so that the join sees a handful of rows and not every report.
ADD_PREDICTIONS = """
INSERT INTO prediction_windows
SELECT c.context_id, n.window_start, c.batch_min, max(c.batch_max), n.speculation_length, sum(n.num_steps),
  sum(n.sum_step_s), sum(n.sum_tokens), sum(n.num_steps * c.step_s), sum(n.num_steps * c.expected_tokens)
FROM (
  SELECT context_id, batch_size, speculation_length, 60 * CAST(received_at / 60 AS INTEGER) AS window_start,
    count(*) AS num_steps, sum(latency_s) AS sum_step_s,
    sum(1 + 1.0 * num_accepted_tokens / batch_size) AS sum_tokens
  FROM step_reports WHERE report_id > ? AND flags = '' GROUP BY 1, 2, 3, 4
) AS n
JOIN latency_cells AS c ON c.context_id = n.context_id AND n.batch_size BETWEEN c.batch_min AND c.batch_max
  AND c.speculation_length = n.speculation_length
GROUP BY n.window_start, c.context_id, c.batch_min, n.speculation_length
ON CONFLICT DO UPDATE SET
  batch_max = excluded.batch_max,
  num_steps = num_steps + excluded.num_steps,
  sum_step_s = sum_step_s + excluded.sum_step_s,
  sum_tokens = sum_tokens + excluded.sum_tokens,
  sum_predicted_step_s = sum_predicted_step_s + excluded.sum_predicted_step_s,
  sum_predicted_tokens = sum_predicted_tokens + excluded.sum_predicted_tokens
"""


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
    last_id = connection.execute("SELECT coalesce(max(report_id), 0) FROM step_reports").fetchone()[0]
    refusals += statements.REPORTS.run(connection, batch.reports)
    failpoints.reach("after_reports")
    if batch.reports:  # before the new estimates replace those that made the prediction
        connection.execute(ADD_PREDICTIONS, (last_id,))
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
