"""One commit: everything that waits, in one transaction, in an order that keeps references whole."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from speclen.store import statements
from speclen.store.batch import Batch, Batches
from speclen.store.connection import Connection, sqlite3
from speclen.store.failpoints import Failpoints
from speclen.store.prediction_windows import add_predictions
from speclen.store.records import ProfileRow, StoreEventRow
from speclen.store.retention import Retention, enforce_retention


class RefusedError(Exception):
    """The database refuses a row without which the others of its scope would be wrong."""


@dataclass(slots=True)
class Outcome:
    """Result of a transaction. failed: by scope, why nothing of it was written. num_refused: rows left out."""

    failed: dict[str, Exception] = field(default_factory=dict)
    num_refused: int = 0


def write(
    connection: Connection, batches: Batches, retention: Retention, failpoints: Failpoints, number: int, now: float
) -> Outcome:
    """Store batches in one transaction, commit `number` of the file. now: seconds since 1970, for retention.

    Each scope is written whole or not at all, and fails alone. Raises errors of SQLite (disk full, damaged file, ...) after
    rolling everything back.
    """
    failpoints.reach("before_begin")
    connection.execute("BEGIN IMMEDIATE")
    try:
        outcome = _write_scopes(connection, batches, failpoints)
        enforce_retention(connection, retention, batches.num_reports, now)
        failpoints.reach("after_retention")
        connection.execute(f"PRAGMA user_version = {number}")
        failpoints.reach("before_commit")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite rolls back by itself after some errors
            connection.execute("ROLLBACK")
        raise
    failpoints.reach("after_commit")
    return outcome


def _write_scopes(connection: Connection, batches: Batches, failpoints: Failpoints) -> Outcome:
    outcome, events = Outcome(), []
    for scope, batch in batches.by_scope.items():
        connection.execute("SAVEPOINT one_scope")
        try:
            refusals = _write_rows(connection, batch, failpoints)
        except sqlite3.Error:
            raise
        except Exception as error:  # a row that cannot be written, or one that is no row
            connection.execute("ROLLBACK TO one_scope")
            outcome.failed[scope] = error
            refusals = [str(error)]
        connection.execute("RELEASE one_scope")
        outcome.num_refused += len(refusals)
        events += _events_of(batch, refusals)
    statements.EVENTS["store_events"].run(connection, events)
    return outcome


def _write_rows(connection: Connection, batch: Batch, failpoints: Failpoints) -> list[str]:
    """Raises RefusedError for a context, a worker's mark or a state that the database does not take."""
    failpoints.reach("after_begin")
    _insert_all(connection, batch, "contexts", "workers")
    failpoints.reach("after_workers")
    refusals = _insert_profiles(connection, batch.profiles)
    bad_reports = statements.REPORTS.run(connection, batch.reports)
    failpoints.reach("after_reports")
    if not bad_reports:  # whose sums would be bad as well
        add_predictions(connection, batch.reports)  # before the new estimates replace those that made the prediction
    failpoints.reach("after_predictions")
    for context_id in batch.replaced_contexts:
        connection.execute("DELETE FROM arm_estimates WHERE context_id = ?", (context_id,))
    refusals += bad_reports + _insert_newest(connection, batch, "arm_estimates", "acceptance")
    _insert_all(connection, batch, "states")
    for name, insert in statements.EVENTS.items():
        refusals += insert.run(connection, batch.events[name])
    failpoints.reach("after_estimates")
    return refusals


def _insert_all(connection: Connection, batch: Batch, *names: str) -> None:
    for name in names:
        refusals = _insert_newest(connection, batch, name)
        if refusals:
            raise RefusedError(f"the database refuses a row of {refusals[0]}")


def _insert_newest(connection: Connection, batch: Batch, *names: str) -> list[str]:
    refusals = []
    for name in names:
        refusals += statements.NEWEST[name].run(connection, batch.newest[name].values())
    return refusals


def _insert_profiles(connection: Connection, profiles: list[ProfileRow]) -> list[str]:
    refusals = []
    for profile in profiles:
        texts = {name: json.dumps(getattr(profile, name)) for name in ("survival", "num_survival_rows")}
        values = profile._asdict() | texts
        refusals += statements.PROFILES.run(connection, [[values[name] for name in statements.PROFILES.columns]])
        refusals += statements.PROFILE_CELLS.run(connection, [(profile.profile_id, *cell) for cell in profile.cells])
    return refusals


def _events_of(batch: Batch, refusals: list[str]) -> list[StoreEventRow]:
    """Store events for the losses of a batch."""
    events = []
    if batch.num_reports_dropped:
        detail = "commits failed for longer than memory allows; the estimates contain these reports"
        events.append(StoreEventRow("reports_dropped", batch.num_reports_dropped, detail, time.time()))
    if refusals:
        events.append(StoreEventRow("rows_refused", len(refusals), refusals[0], time.time()))
    return events
