"""Inserts of many rows by few statements.

One statement carries up to 256 rows. `executemany` would run one statement per row and give up Python's interpreter
lock each time; beside an event loop that is busy, getting it back costs far more than the row (measured: 24 us a row
against 4.5 us).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from speclen.records import ProfileCell
from speclen.store.connection import Connection, sqlite3
from speclen.store.records import (
    AcceptanceRow,
    ArmEstimateRow,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    HoldsRow,
    ReportRow,
    StateRow,
    StoreEventRow,
    TrialRow,
    WorkerRow,
)

# Rows per statement, largest first. 256 rows of 22 values stay far below SQLite's limit of 32,766 values.
BLOCKS = (256, 64, 16, 4, 1)

# What a row that breaks a rule of the schema raises; a full disk or a damaged file raises something else.
BAD_ROW_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError, ValueError)


class Refusal(NamedTuple):
    """A row that breaks a rule of the schema. reason: one sentence."""

    reason: str
    row: Sequence[Any]


class Insert:
    """Inserts rows of one table; with a key, a row that is there already is updated.

    unless_older: a column; a row with a smaller value than the one that is there changes nothing.
    """

    def __init__(self, table: str, columns: Sequence[str], key: Sequence[str] = (), unless_older: str = "") -> None:
        self.table = table
        self.unless_older = unless_older
        self.columns = tuple(columns)
        self.key = tuple(key)

    @cached_property
    def _statements(self) -> dict[int, str]:
        row = f"({', '.join('?' * len(self.columns))})"
        update = ""
        if self.key:
            changes = ", ".join(f"{name} = excluded.{name}" for name in self.columns if name not in self.key)
            update = f" ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {changes}"
            if self.unless_older:
                update += f" WHERE excluded.{self.unless_older} >= {self.table}.{self.unless_older}"
        head = f"INSERT INTO {self.table} ({', '.join(self.columns)}) VALUES "
        return {size: head + ", ".join([row] * size) + update for size in BLOCKS}

    def run(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> list[Refusal]:
        """Insert rows of values; returns the rows that were refused, and inserts all others."""
        waiting, start, refusals = list(rows), 0, list[Refusal]()
        for size in BLOCKS:
            while len(waiting) - start >= size:
                refusals += self._insert(connection, waiting[start : start + size])
                start += size
        return refusals

    def _insert(self, connection: Connection, block: Sequence[Sequence[Any]]) -> list[Refusal]:
        """A statement that fails changes nothing, so every row of its block can still be tried alone."""
        try:
            connection.execute(self._statements[len(block)], tuple(chain.from_iterable(block)))
        except BAD_ROW_ERRORS as error:
            if len(block) == 1:
                return [Refusal(f"{self.table}: {error}", block[0])]
            return [refusal for row in block for refusal in self._insert(connection, [row])]
        return []


PROFILES = Insert(
    "profiles",
    ("profile_id", "context_id", "source", "survival", "num_survival_rows", "after_group_id", "imported_at"),
)
PROFILE_CELLS = Insert("profile_cells", ("profile_id", *ProfileCell._fields))
REPORTS = Insert("step_reports", ReportRow._fields)

# By the field of a commit: rows of which the newest of each key counts.
NEWEST = {
    "contexts": Insert("contexts", ContextRow._fields, ("context_id",)),
    # Contexts commit apart: a row of an older incarnation may come after one of the present one.
    "workers": Insert("workers", WorkerRow._fields, ("worker_key",), unless_older="epoch"),
    "arm_estimates": Insert(
        "arm_estimates", ArmEstimateRow._fields, ("context_id", "batch_min", "speculation_length", "ngram")
    ),
    "acceptance": Insert("acceptance", AcceptanceRow._fields, ("context_id", "position")),
    "states": Insert("learned_states", StateRow._fields, ("context_id",)),
}

# By the field of a commit: rows that add up.
EVENTS = {
    "context_limits": Insert("context_limits", ContextLimitsRow._fields),
    "decisions": Insert("decisions", DecisionRow._fields),
    "drift_events": Insert("drift_events", DriftEventRow._fields),
    "trials": Insert("trials", TrialRow._fields),
    "holds": Insert("holds", HoldsRow._fields, ("context_id",)),
    "store_events": Insert("store_events", StoreEventRow._fields),
}
