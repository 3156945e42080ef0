"""Commits in one transaction: inserts of many rows, in an order that keeps references whole.

One statement carries up to 256 rows. `executemany` runs one statement per row and releases Python's interpreter lock each
time; next to a busy event loop, taking it back costs far more than the row (measured: 24 us a row against 4.5 us).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from speclen.records import ProfileCell
from speclen.store.connection import Connection, sqlite3
from speclen.store.retention import Retention, enforce_retention
from speclen.store.schema import (
    PROFILE_COLUMNS,
    AcceptanceRow,
    ArmEstimateRow,
    Commit,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    HoldsRow,
    PredictionRow,
    ProfileRow,
    ReportRow,
    StateRow,
    StoreEventRow,
    TrialRow,
    WorkerRow,
)

# Rows per statement, largest first. 256 rows of 22 values are far below SQLite's limit of 32,766 values.
BLOCKS = (256, 64, 16, 4, 1)

# Errors of a row that violates the schema; a full disk or a damaged file raises others.
BAD_ROW_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError, ValueError)


class Refusal(NamedTuple):
    """A row that violates the schema. reason: one sentence."""

    reason: str
    row: Sequence[Any]


class Insert:
    """Inserts rows into one table. With a key, an existing row is updated.

    unless_older: a column; a row whose value is smaller than the existing one's is ignored. summed: columns whose value is
    added to the existing one's.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[str],
        key: Sequence[str] = (),
        unless_older: str = "",
        summed: Sequence[str] = (),
    ) -> None:
        self.table = table
        self.unless_older = unless_older
        self.summed = tuple(summed)
        self.columns = tuple(columns)
        self.key = tuple(key)

    @cached_property
    def _statements(self) -> dict[int, str]:
        row = f"({', '.join('?' * len(self.columns))})"
        update = ""
        if self.key:
            changes = ", ".join(self._change(name) for name in self.columns if name not in self.key)
            update = f" ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {changes}"
            if self.unless_older:
                update += f" WHERE excluded.{self.unless_older} >= {self.table}.{self.unless_older}"
        head = f"INSERT INTO {self.table} ({', '.join(self.columns)}) VALUES "
        return {size: head + ", ".join([row] * size) + update for size in BLOCKS}

    def _change(self, name: str) -> str:
        return f"{name} = {f'{self.table}.{name} + ' if name in self.summed else ''}excluded.{name}"

    def run(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> list[Refusal]:
        """Insert rows, and return those that violate the schema."""
        waiting, start, refusals = list(rows), 0, list[Refusal]()
        for size in BLOCKS:
            while len(waiting) - start >= size:
                refusals += self._insert(connection, waiting[start : start + size])
                start += size
        return refusals

    def _insert(self, connection: Connection, block: Sequence[Sequence[Any]]) -> list[Refusal]:
        """Insert a block of rows. If that fails, nothing has changed, and each row is tried alone."""
        try:
            connection.execute(self._statements[len(block)], tuple(chain.from_iterable(block)))
        except BAD_ROW_ERRORS as error:
            if len(block) == 1:
                return [Refusal(f"{self.table}: {error}", block[0])]
            return [refusal for row in block for refusal in self._insert(connection, [row])]
        return []


PROFILES = Insert("profiles", PROFILE_COLUMNS)
PROFILE_CELLS = Insert("profile_cells", ("profile_id", *ProfileCell._fields))
REPORTS = Insert("step_reports", ReportRow._fields)

# By field of `Commit`: tables that keep the newest row of each key.
NEWEST = {
    "contexts": Insert("contexts", ContextRow._fields, ("context_id",)),
    # Contexts commit separately: the row of an older incarnation may arrive after that of the current one.
    "workers": Insert("workers", WorkerRow._fields, ("worker_key",), unless_older="epoch"),
    "arm_estimates": Insert(
        "arm_estimates", ArmEstimateRow._fields, ("context_id", "batch_min", "speculation_length", "ngram")
    ),
    "acceptance": Insert("acceptance", AcceptanceRow._fields, ("context_id", "position")),
    "states": Insert("learned_states", StateRow._fields, ("context_id",)),
}

# By field of `Commit`: tables whose rows may be refused one by one.
EVENTS = {
    "context_limits": Insert("context_limits", ContextLimitsRow._fields),
    "decisions": Insert("decisions", DecisionRow._fields),
    "drift_events": Insert("drift_events", DriftEventRow._fields),
    "trials": Insert("trials", TrialRow._fields),
    "holds": Insert("holds", HoldsRow._fields, ("context_id",)),
    "predictions": Insert(
        "prediction_windows",
        PredictionRow._fields,
        ("window_start", "context_id", "batch_min"),
        summed=("num_steps", "num_tokens", "observed_s", "predicted_s"),
    ),
    "store_events": Insert("store_events", StoreEventRow._fields),
}


class RefusedError(Exception):
    """The database refuses a row on which the rest of its commit depends."""


class ReportsRefusedError(Exception):
    """A commit was written without some of its reports, which violate the schema. seqs: of these, by worker_key."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__(f"the database refuses {len(refusals)} reports ({refusals[0].reason})")
        self.seqs: defaultdict[int, list[int]] = defaultdict(list)
        for refusal in refusals:
            row = ReportRow(*refusal.row)
            self.seqs[row.worker_key].append(row.seq)


@dataclass(slots=True)
class Outcome:
    """Result of a transaction. errors: of commits not written completely, by index. refusals: reasons of omitted rows."""

    errors: dict[int, Exception] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)


def write(connection: Connection, commits: Sequence[Commit], retention: Retention, number: int, now: float) -> Outcome:
    """Write commits in one transaction. number: of the transaction. now: seconds since 1970, for retention.

    Each commit is written completely or not at all, and fails alone. Raises sqlite3.Error (disk full, damaged file, ...)
    after rolling everything back.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        outcome = _write_all(connection, commits)
        enforce_retention(connection, retention, sum(len(commit.reports) for commit in commits), now)
        connection.execute(f"PRAGMA user_version = {number}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # after some errors SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise
    return outcome


def _write_all(connection: Connection, commits: Sequence[Commit]) -> Outcome:
    outcome, events = Outcome(), []
    for place, commit in enumerate(commits):
        connection.execute("SAVEPOINT one_commit")
        try:
            bad_reports, refusals = _write_rows(connection, commit)
            if bad_reports:
                outcome.errors[place] = ReportsRefusedError(bad_reports)
        except sqlite3.Error:
            raise
        except Exception as error:  # an invalid row
            connection.execute("ROLLBACK TO one_commit")
            outcome.errors[place] = error
            refusals = [str(error)]
        connection.execute("RELEASE one_commit")
        outcome.refusals += refusals
        events += _events_of(commit, refusals)
    EVENTS["store_events"].run(connection, events)
    return outcome


def _write_rows(connection: Connection, commit: Commit) -> tuple[list[Refusal], list[str]]:
    """Write a commit. Returns the omitted reports, and the reasons for all omitted rows.

    Raises RefusedError if the database refuses a context, a worker's high-water mark or a state.
    """
    _insert_all(connection, commit, "contexts", "workers")
    refusals = _insert_profiles(connection, commit.profiles)
    bad_reports = REPORTS.run(connection, commit.reports)
    for context_id in commit.replaced_contexts:
        connection.execute("DELETE FROM arm_estimates WHERE context_id = ?", (context_id,))
    refusals += bad_reports + _insert_newest(connection, commit, "arm_estimates", "acceptance")
    _insert_all(connection, commit, "states")
    for name, insert in EVENTS.items():
        refusals += insert.run(connection, getattr(commit, name))
    return bad_reports, [refusal.reason for refusal in refusals]


def _insert_all(connection: Connection, commit: Commit, *names: str) -> None:
    if refusals := _insert_newest(connection, commit, *names):
        raise RefusedError(f"the database refuses a row of {refusals[0].reason}")


def _insert_newest(connection: Connection, commit: Commit, *names: str) -> list[Refusal]:
    return [refusal for name in names for refusal in NEWEST[name].run(connection, getattr(commit, name))]


def _insert_profiles(connection: Connection, profiles: Sequence[ProfileRow]) -> list[Refusal]:
    refusals = []
    for row in profiles:
        profile = row.profile
        texts = profile.source, json.dumps(profile.survival), json.dumps(profile.num_survival_rows)
        values = row.profile_id, row.context_id, *texts, row.after_group_id, row.imported_at
        refusals += PROFILES.run(connection, [values])
        refusals += PROFILE_CELLS.run(connection, [(row.profile_id, *cell) for cell in profile.cells])
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
