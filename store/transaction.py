"""Commits that wait, in one transaction, each in an order that keeps references whole."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from speclen.store import statements
from speclen.store.connection import Connection, sqlite3
from speclen.store.prediction_windows import add_predictions
from speclen.store.records import Commit, ProfileRow, StoreEventRow
from speclen.store.retention import Retention, enforce_retention


class RefusedError(Exception):
    """The database refuses a row without which the others of its commit would be wrong."""


@dataclass(slots=True)
class Outcome:
    """Result of a transaction. failed: by a commit's place, why nothing of it was written. num_refused: rows left out."""

    failed: dict[int, Exception] = field(default_factory=dict)
    num_refused: int = 0


def write(connection: Connection, commits: Sequence[Commit], retention: Retention, number: int, now: float) -> Outcome:
    """Store commits in one transaction, `number` of the file. now: seconds since 1970, for retention.

    Each is written whole or not at all, and fails alone. Raises errors of SQLite (disk full, damaged file, ...) after
    rolling everything back.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        outcome = _write_all(connection, commits)
        enforce_retention(connection, retention, sum(len(commit.reports) for commit in commits), now)
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite rolls back by itself after some errors
            connection.execute("ROLLBACK")
        raise
    return outcome


def _write_all(connection: Connection, commits: Sequence[Commit]) -> Outcome:
    outcome, events = Outcome(), []
    for place, commit in enumerate(commits):
        connection.execute("SAVEPOINT one_commit")
        try:
            refusals = _write_rows(connection, commit)
        except sqlite3.Error:
            raise
        except Exception as error:  # a row that cannot be written, or one that is no row
            connection.execute("ROLLBACK TO one_commit")
            outcome.failed[place] = error
            refusals = [str(error)]
        connection.execute("RELEASE one_commit")
        outcome.num_refused += len(refusals)
        events += _events_of(commit, refusals)
    statements.EVENTS["store_events"].run(connection, events)
    return outcome


def _write_rows(connection: Connection, commit: Commit) -> list[str]:
    """Raises RefusedError for a context, a worker's mark or a state that the database does not take."""
    _insert_all(connection, commit, "contexts", "workers")
    refusals = _insert_profiles(connection, commit.profiles)
    bad_reports = statements.REPORTS.run(connection, commit.reports)
    if not bad_reports:  # whose sums would be bad as well
        add_predictions(connection, commit.reports)  # before the new estimates replace those that made the prediction
    for context_id in commit.replaced_contexts:
        connection.execute("DELETE FROM arm_estimates WHERE context_id = ?", (context_id,))
    refusals += bad_reports + _insert_newest(connection, commit, "arm_estimates", "acceptance")
    _insert_all(connection, commit, "states")
    for name, insert in statements.EVENTS.items():
        refusals += insert.run(connection, getattr(commit, name))
    return refusals


def _insert_all(connection: Connection, commit: Commit, *names: str) -> None:
    for name in names:
        refusals = _insert_newest(connection, commit, name)
        if refusals:
            raise RefusedError(f"the database refuses a row of {refusals[0]}")


def _insert_newest(connection: Connection, commit: Commit, *names: str) -> list[str]:
    refusals = []
    for name in names:
        refusals += statements.NEWEST[name].run(connection, getattr(commit, name))
    return refusals


def _insert_profiles(connection: Connection, profiles: Sequence[ProfileRow]) -> list[str]:
    refusals = []
    for row in profiles:
        profile = row.profile
        texts = profile.source, json.dumps(profile.survival), json.dumps(profile.num_survival_rows)
        values = row.profile_id, row.context_id, *texts, row.after_group_id, row.imported_at
        refusals += statements.PROFILES.run(connection, [values])
        refusals += statements.PROFILE_CELLS.run(connection, [(row.profile_id, *cell) for cell in profile.cells])
    return refusals


def _events_of(commit: Commit, refusals: list[str]) -> list[StoreEventRow]:
    """Store events for the losses of a commit."""
    events = []
    if commit.num_reports_dropped:
        detail = "commits failed for longer than memory allows; the estimates contain these reports"
        events.append(StoreEventRow("reports_dropped", commit.num_reports_dropped, detail, time.time()))
    if refusals:
        events.append(StoreEventRow("rows_refused", len(refusals), refusals[0], time.time()))
    return events
