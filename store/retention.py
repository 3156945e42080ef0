"""Bounds on the size of the file: old rows are deleted as new ones arrive, and free pages are returned to the disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from speclen.store.connection import Connection

MOST_REPORT_BYTES = 500  # of a report with its evaluations, several times the mean in a fleet
BYTES_BESIDE_REPORTS = 2**28  # tables and states of a thousand contexts, decisions, events
PREDICTION_DAYS = 7.0  # of prediction_error; up to 3 MB a day for a context that is busy at all batch sizes
MAX_EVENT_ROWS = 100_000  # of decisions, drift events, store events and trials each


@dataclass(frozen=True, slots=True)
class Retention:
    """Bounds on tables that grow with time. The learned tables are always kept.

    max_report_rows: raw reports to keep, about 90 bytes each (docs/explanation/store.md). max_days: age after which raw
    reports are deleted.
    """

    max_report_rows: int = 5_000_000
    max_days: float = 30.0

    @property
    def max_bytes(self) -> int:
        """Size of the file above which the oldest reports are deleted."""
        return BYTES_BESIDE_REPORTS + MOST_REPORT_BYTES * self.max_report_rows


# For programs that open a database without knowing its controller's retention.
KEEP_REPORTS = Retention(max_report_rows=2**62, max_days=math.inf)

DAY_S = 86400.0

# One commit deletes this many rows more than twice those it inserts, so that a lowered limit is reached in steps.
EXTRA_ROWS_PER_COMMIT = 2_000

# For a file that is too large: reports deleted at a time, repetitions in one commit, reports that are always kept.
CHUNK_ROWS, MOST_CHUNKS, FEWEST_ROWS = 500, 20, 10_000

# Pages of 4 KiB returned after one commit, and the number and share of pages that must be free before any is.
VACUUM_PAGES = 250
VACUUM_ABOVE_PAGES = 500
VACUUM_ABOVE_SHARE = 0.25


def enforce_retention(connection: Connection, retention: Retention, num_new_reports: int, now: float) -> None:
    """Delete rows beyond the bounds within the current transaction. now: seconds since 1970."""
    oldest_at = now - retention.max_days * DAY_S
    _trim_reports(connection, retention.max_report_rows, oldest_at, 2 * num_new_reports + EXTRA_ROWS_PER_COMMIT)
    oldest_window = now - PREDICTION_DAYS * DAY_S
    connection.execute("DELETE FROM prediction_windows WHERE window_start < ?", (oldest_window,))
    for _ in range(MOST_CHUNKS):
        if used_bytes(connection) <= retention.max_bytes:
            break
        _trim_reports(connection, min(retention.max_report_rows, FEWEST_ROWS), oldest_at, CHUNK_ROWS)
    for table in ("decisions", "drift_events", "store_events", "trials"):
        key = f"{table.removesuffix('s')}_id"
        connection.execute(
            f"DELETE FROM {table} WHERE {key} <= (SELECT max({key}) FROM {table}) - ?", (MAX_EVENT_ROWS,)
        )


def used_bytes(connection: Connection) -> int:
    """Size of the file without free pages, in bytes."""
    num_pages, num_free, page_bytes = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((num_pages - num_free) * page_bytes)


def _trim_reports(connection: Connection, max_rows: int, oldest_at: float, max_deleted: int) -> None:
    """Delete up to max_deleted of the oldest reports. The newest is always kept, because numbering continues from it."""
    first = connection.execute("SELECT report_id, received_at FROM step_reports ORDER BY report_id LIMIT 1").fetchone()
    if first is None:
        return
    newest_id = connection.execute("SELECT max(report_id) FROM step_reports").fetchone()[0]
    keep_from = newest_id - max_rows + 1
    if first[0] >= keep_from and first[1] >= oldest_at:
        return
    connection.execute(
        "DELETE FROM step_reports WHERE report_id < min(?, ?) AND (report_id < ? OR received_at < ?)",
        (newest_id, first[0] + max_deleted, keep_from, oldest_at),
    )


def give_back_space(connection: Connection) -> None:
    """Return some free pages to the disk if a large part of the file is free."""
    num_free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    num_pages = connection.execute("PRAGMA page_count").fetchone()[0]
    if num_free >= max(VACUUM_ABOVE_PAGES, VACUUM_ABOVE_SHARE * num_pages):
        # `execute` of Python's own library would only step once and free a single page.
        connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
