"""Queries for readers. Every function takes a connection from `connect_reader`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from speclen.records import Profile, ProfileCell
from speclen.store.connection import Connection
from speclen.store.schema import (
    PROFILE_COLUMNS,
    AcceptanceRow,
    ArmEstimateRow,
    ContextLimitsRow,
    ContextRow,
    DecisionRow,
    HoldsRow,
    ProfileRow,
    ReportRow,
    Row,
    StateRow,
    StoredState,
    TrialRow,
    WorkerRow,
)

# Columns that hold 0 or 1.
BOOLEANS = ("ngram", "previous_ngram", "is_best", "learned_ngram", "baseline_ngram", "is_baseline_used")


def load_state(connection: Connection) -> StoredState:
    """Everything that a restarted controller needs. Raw reports are not read, so the cost does not grow with them."""
    # Contexts commit separately, so the highest group is near the last row but not always in it, and after a crash a context
    # or a profile may follow a group that was lost. Retention never deletes the newest report. Scanning all rows would take
    # a second per 10 million.
    known = (
        "SELECT max(group_id) AS known FROM (SELECT group_id FROM step_reports ORDER BY report_id DESC LIMIT 200000) "
        "UNION ALL SELECT max(after_group_id) FROM context_limits UNION ALL SELECT max(after_group_id) FROM profiles"
    )
    return StoredState(
        contexts=contexts(connection),
        workers=workers(connection),
        states={row.context_id: row.state for row in _rows(connection, StateRow, "learned_states")},
        last_group_id=connection.execute(f"SELECT coalesce(max(known), 0) FROM ({known})").fetchone()[0],
        last_profile_id=connection.execute("SELECT coalesce(max(profile_id), 0) FROM profiles").fetchone()[0],
    )


def _rows(connection: Connection, row_class: type[Row], source: str, *values: Any) -> Iterator[Row]:
    names = row_class._fields
    booleans = [names.index(name) for name in BOOLEANS if name in names]
    for row in connection.execute(f"SELECT {', '.join(names)} FROM {source}", values):
        content = list(row)
        for place in booleans:
            content[place] = None if content[place] is None else bool(content[place])
        yield row_class(*content)


def stored_reports(connection: Connection) -> Iterator[ReportRow]:
    """Raw reports in the order in which the controller processed them."""
    return _rows(connection, ReportRow, "step_reports ORDER BY report_id")


def contexts(connection: Connection) -> tuple[ContextRow, ...]:
    """Every context, in order of context_id."""
    return tuple(_rows(connection, ContextRow, "contexts ORDER BY context_id"))


def context_limits(connection: Connection) -> tuple[ContextLimitsRow, ...]:
    """Limits of contexts when they were created and widened, in order."""
    return tuple(_rows(connection, ContextLimitsRow, "context_limits ORDER BY context_limits_id"))


def workers(connection: Connection) -> tuple[WorkerRow, ...]:
    """Every worker, in order of worker_key."""
    return tuple(_rows(connection, WorkerRow, "workers ORDER BY worker_key"))


def arm_estimates(connection: Connection, context_id: int) -> list[ArmEstimateRow]:
    """Every estimate of a context, in order of batch size and arm."""
    source = "arm_estimates WHERE context_id = ? ORDER BY batch_min, ngram, speculation_length"
    return list(_rows(connection, ArmEstimateRow, source, context_id))


def acceptance(connection: Connection, context_id: int) -> list[AcceptanceRow]:
    """Survival in a context, in order of position."""
    source = "acceptance WHERE context_id = ? ORDER BY position"
    return list(_rows(connection, AcceptanceRow, source, context_id))


def decisions(connection: Connection) -> list[DecisionRow]:
    """Every change of an arm in use, in order."""
    return list(_rows(connection, DecisionRow, "decisions ORDER BY decision_id"))


def trials(connection: Connection, since: float = 0.0) -> list[TrialRow]:
    """Finished trials, in order. since: earliest ended_at, in seconds since 1970."""
    return list(_rows(connection, TrialRow, "trials WHERE ended_at >= ? ORDER BY trial_id", since))


def holds(connection: Connection) -> list[HoldsRow]:
    """The holds of every context that has any."""
    return list(_rows(connection, HoldsRow, "holds ORDER BY context_id"))


def newest_decision(connection: Connection, context_id: int, batch_size: int) -> DecisionRow | None:
    """The newest change of the arm in use at a batch size; None if there was none."""
    source = "decisions WHERE context_id = ? AND ? BETWEEN batch_min AND batch_max ORDER BY decision_id DESC LIMIT 1"
    return next(_rows(connection, DecisionRow, source, context_id, batch_size), None)


def view_rows(connection: Connection, view: str) -> list[dict[str, Any]]:
    """Every row of a view as a dictionary, in the view's own order."""
    cursor = connection.execute(f"SELECT * FROM {view}")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def stored_profiles(connection: Connection) -> list[ProfileRow]:
    """Every profile of the database, in order of profile_id."""
    cells: dict[int, list[ProfileCell]] = defaultdict(list)
    columns = ", ".join(ProfileCell._fields)
    order = "profile_id, batch_size, speculation_length"
    for profile_id, *values in connection.execute(f"SELECT profile_id, {columns} FROM profile_cells ORDER BY {order}"):
        cells[profile_id].append(ProfileCell(*values))
    found = []
    for profile_id, context_id, source, survival, num_rows, after_group_id, imported_at in connection.execute(
        f"SELECT {', '.join(PROFILE_COLUMNS)} FROM profiles ORDER BY profile_id"
    ):
        lists = tuple(json.loads(survival)), tuple(json.loads(num_rows))
        profile = Profile(tuple(cells[profile_id]), *lists, source)
        found.append(ProfileRow(profile_id, context_id, profile, after_group_id, imported_at))
    return found
