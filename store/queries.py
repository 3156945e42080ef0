"""What readers ask of a database: rows as values. Every function takes a connection of `connect_reader`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar

from speclen.store.connection import Connection
from speclen.store.records import (
    AcceptanceRow,
    ContextLimitsRow,
    ContextRow,
    LatencyCellRow,
    ReportRow,
    StoredState,
    WorkerRow,
)

Row = TypeVar("Row", AcceptanceRow, ContextLimitsRow, ContextRow, LatencyCellRow, WorkerRow)


def load_state(connection: Connection) -> StoredState:
    """All that a controller needs to go on; raw reports are not read, so this does not grow with their number."""
    states = connection.execute("SELECT scope, key, state FROM learned_states ORDER BY updated_at").fetchall()
    return StoredState(
        contexts=tuple(_rows(connection, "contexts ORDER BY context_id", ContextRow)),
        workers=tuple(_rows(connection, "workers ORDER BY worker_key", WorkerRow)),
        states={(row[0], row[1]): row[2] for row in states},
        last_group_id=_last_group_id(connection),
        last_profile_id=connection.execute("SELECT coalesce(max(profile_id), 0) FROM profiles").fetchone()[0],
    )


def _rows(connection: Connection, source: str, row_class: type[Row], *values: Any) -> Iterator[Row]:
    # Newer columns come last and have defaults: a file that no newer controller has opened yet lacks them.
    known = {row[1] for row in connection.execute(f"PRAGMA table_info({source.split()[0]})")}
    columns = ", ".join(field.name for field in fields(row_class) if field.name in known)
    return (row_class(*row) for row in connection.execute(f"SELECT {columns} FROM {source}", values))


def _last_group_id(connection: Connection) -> int:
    """The highest group stored. Pairs of models commit apart, so it need not be the last row's, but it is near.

    Retention never deletes the newest report. Looking at all of them would take a second per 10 million.
    """
    newest = "SELECT group_id FROM step_reports ORDER BY report_id DESC LIMIT 200000"
    return connection.execute(f"SELECT coalesce(max(group_id), 0) FROM ({newest})").fetchone()[0]


def stored_reports(connection: Connection) -> Iterator[ReportRow]:
    """Raw reports in the order in which they were learned from, also of a file that no newer controller has opened."""
    known = {row[1] for row in connection.execute("PRAGMA table_info(step_reports)")}
    columns = ", ".join(name for name in ReportRow._fields if name in known)  # the newer ones come last
    return (ReportRow(*row) for row in connection.execute(f"SELECT {columns} FROM step_reports ORDER BY report_id"))


def newest_reports(connection: Connection, context_id: int, limit: int) -> Iterator[ReportRow]:
    """The newest raw reports of a context, the newest first: they can be had where an older one cannot be read."""
    columns = ", ".join(ReportRow._fields)
    query = f"SELECT {columns} FROM step_reports WHERE context_id = ? ORDER BY report_id DESC LIMIT ?"
    return (ReportRow(*row) for row in connection.execute(query, (context_id, limit)))


def contexts_with_reports(connection: Connection) -> set[int]:
    """Of which raw reports are kept, in one look at all of them: a look for those of one context takes as long."""
    return {row[0] for row in connection.execute("SELECT DISTINCT context_id FROM step_reports")}


def contexts(connection: Connection) -> tuple[ContextRow, ...]:
    """Every context known, in order of context_id."""
    return tuple(_rows(connection, "contexts ORDER BY context_id", ContextRow))


def context_limits(connection: Connection) -> tuple[ContextLimitsRow, ...]:
    """When contexts were made and widened, in order; nothing in a file that no newer controller has opened yet."""
    if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'context_limits'").fetchone():
        return ()
    return tuple(_rows(connection, "context_limits ORDER BY context_limits_id", ContextLimitsRow))


def workers(connection: Connection) -> tuple[WorkerRow, ...]:
    """Every worker known, in order of worker_key."""
    return tuple(_rows(connection, "workers ORDER BY worker_key", WorkerRow))


def latency_cells(connection: Connection, context_id: int) -> list[LatencyCellRow]:
    """Every cell of a context, in order of bucket and length."""
    source = "latency_cells WHERE context_id = ? ORDER BY batch_min, speculation_length"
    return list(_rows(connection, source, LatencyCellRow, context_id))


def acceptance(connection: Connection, target: str, draft: str) -> list[AcceptanceRow]:
    """Survival of a pair, in order of load band and position."""
    source = "acceptance WHERE target = ? AND draft = ? ORDER BY batch_min, position"
    return list(_rows(connection, source, AcceptanceRow, target, draft))


def view_rows(connection: Connection, view: str) -> list[dict[str, Any]]:
    """Every row of a view as a dictionary, in the view's own order."""
    cursor = connection.execute(f"SELECT * FROM {view}")
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
