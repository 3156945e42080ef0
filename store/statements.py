"""Inserts of many rows by few statements.

One statement carries up to 256 rows. `executemany` would run one statement per row and give up Python's interpreter
lock each time; beside an event loop that is busy, getting it back costs far more than the row (measured: 24 us a row
against 4.5 us).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

from speclen.store.connection import Connection, sqlite3
from speclen.store.records import (
    AcceptanceRow,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    DriftEventRow,
    LatencyCellRow,
    PlanEstimateRow,
    ProfileCellRow,
    ProfileRow,
    ReportRow,
    StateRow,
    StoreEventRow,
    WorkerRow,
)

# Rows per statement, largest first. 256 rows of 16 values stay far below SQLite's limit of 32,766 values.
BLOCKS = (256, 64, 16, 4, 1)

# What a row that breaks a rule of the schema raises; a full disk or a damaged file raises something else.
BAD_ROW_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError, ValueError)


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
    def as_values(self) -> Callable[[Any], tuple[Any, ...]]:
        """Turns a row's dataclass into the values of its columns."""
        return attrgetter(*self.columns)

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

    def run(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> list[str]:
        """Insert rows of values; returns why rows were refused, one sentence each, and inserts all others."""
        waiting, start, refusals = list(rows), 0, []
        for size in BLOCKS:
            while len(waiting) - start >= size:
                block = waiting[start : start + size]
                try:
                    connection.execute(self._statements[size], tuple(chain.from_iterable(block)))
                except BAD_ROW_ERRORS as error:
                    refusals += self._one_by_one(connection, block) if size > 1 else [f"{self.table}: {error}"]
                start += size
        return refusals

    def _one_by_one(self, connection: Connection, block: Sequence[Sequence[Any]]) -> list[str]:
        """A statement that fails changes nothing, so every row of the block can still be tried alone."""
        refusals = []
        for row in block:
            try:
                connection.execute(self._statements[1], tuple(row))
            except BAD_ROW_ERRORS as error:
                refusals.append(f"{self.table}: {error}")
        return refusals


def _of(
    table: str, row_class: type, key: Sequence[str] = (), without: Sequence[str] = (), unless_older: str = ""
) -> Insert:
    return Insert(table, [field.name for field in fields(row_class) if field.name not in without], key, unless_older)


CONTEXTS = _of("contexts", ContextRow, ("context_id",))
# Pairs commit apart: what one noted of a worker's last life may come after what another noted of the present one.
WORKERS = _of("workers", WorkerRow, ("worker_key",), unless_older="epoch")
ACCEPTANCE = _of("acceptance", AcceptanceRow, ("target", "draft", "batch_min", "position"))
LATENCY_CELLS = _of("latency_cells", LatencyCellRow, ("context_id", "batch_min", "speculation_length"))
PLAN_ESTIMATES = _of("plan_estimates", PlanEstimateRow, ("context_id", "batch_min", "place"))
STATES = _of("learned_states", StateRow, ("scope", "key"))
DECISIONS = _of("decisions", DecisionRow)
DRIFT_EVENTS = _of("drift_events", DriftEventRow)
PROFILES = _of("profiles", ProfileRow, without=("cells",))
PROFILE_CELLS = Insert("profile_cells", ["profile_id", *(field.name for field in fields(ProfileCellRow))])
PROFILE_CELL_VALUES = attrgetter(*PROFILE_CELLS.columns[1:])
REPORTS = Insert("step_reports", ReportRow._fields)
CONTEXT_LIMITS = _of("context_limits", ContextLimitsRow)
STORE_EVENTS = _of("store_events", StoreEventRow)
