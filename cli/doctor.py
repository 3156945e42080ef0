"""`speclen doctor`: finds problems of a database and says how to fix them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speclen.cli.gain import document_of, interval_text
from speclen.cli.support.database import DB_OPTION, told
from speclen.cli.support.output import UserError
from speclen.store.backup import is_empty
from speclen.store.connection import (
    OLDEST_SAFE_SQLITE,
    Connection,
    UnlockedConnection,
    checking,
    in_one_line,
    size_or_zero,
    sqlite3,
)
from speclen.store.files import is_locked
from speclen.store.queries import trials, view_rows

# About a day of reports at 100 a second.
LOW_SPACE_BYTES = 1 << 30
DAY_S = 86_400.0
ISOLATED_WITHIN_S = 7 * DAY_S
MOST_NAMED = 20  # workers named per finding; thousands are stale if every incarnation has a name of its own
ISOLATED_ADVICE = "check its machine: it may be throttled, shared, or another device; other workers are not affected"


@dataclass(frozen=True, slots=True)
class Finding:
    """status: "ok", "warning" (works, but needs attention) or "failed". advice: what to do; empty if ok."""

    check: str
    status: str
    found: str
    advice: str = ""


Check = Callable[[Path, Connection], Iterator[Finding]]


def doctor(
    db: Path = DB_OPTION,
    quick: bool = typer.Option(
        False, "--quick", help="Skip reading the whole file, which takes about a second per GB."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check a database: integrity, space, stale workers, losses. Exit code 1 if a check failed.

    Example: speclen doctor --db .speclen/speclen.db
    """
    findings = examine(db, quick)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Console(markup=False).print(report(findings))
    if any(finding.status == "failed" for finding in findings):
        raise typer.Exit(1)


def examine(db: Path, quick: bool = False) -> list[Finding]:
    """Run all checks. Raises UserError if there is no file; problems of the file are findings."""
    if not db.is_file() or is_empty(db):
        raise UserError(f"there is no database at {db}: name one with --db, or start a controller first")
    checks: list[Check] = [space, workers, isolated, slower, given_up]
    if not quick:
        checks.insert(0, integrity)
    # Before SQLite opens the file: checking the writer's lock closes the file, which would release SQLite's own locks.
    first, findings = [*library(), *writer(db)], list[Finding]()
    try:
        with told(db, lambda: checking(db)) as connection:
            findings += first
            for check in checks:
                findings += check(db, connection)
    except UserError as error:
        findings.append(failed("file", error))
    return findings


def failed(check: str, error: Exception) -> Finding:
    """Finding for an error of the form "problem: advice"."""
    found, _, advice = str(error).rstrip(".").rpartition(": ")
    return Finding(check, "failed", found or advice, advice if found else "")


def library() -> Iterator[Finding]:
    found = f"SQLite {sqlite3.sqlite_version}"
    if sqlite3.sqlite_version_info >= OLDEST_SAFE_SQLITE:
        yield Finding("library", "ok", found)
        return
    needed = ".".join(map(str, OLDEST_SAFE_SQLITE))
    yield Finding("library", "warning", found, f"install pysqlite3: SQLite before {needed} can damage a WAL file")


def writer(db: Path) -> Iterator[Finding]:
    try:
        yield Finding("writer", "ok", "a controller is running" if is_locked(db) else "no controller is running")
    except OSError as error:
        yield Finding(
            "writer", "warning", f"unknown ({error.strerror})", "run this as the user that runs the controller"
        )


def integrity(db: Path, connection: Connection) -> Iterator[Finding]:
    advice = "restore a backup, or start the controller with --move-corrupt-aside to start with an empty one"
    try:
        problems = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
        orphans = connection.execute("PRAGMA foreign_key_check").fetchall()
    except sqlite3.DatabaseError as error:
        yield Finding("integrity", "failed", in_one_line(error), advice)
        return
    if problems != ["ok"]:
        yield Finding("integrity", "failed", problems[0].splitlines()[-1], advice)
    elif orphans:
        found = f"{len(orphans)} rows refer to something that is not there, the first in {orphans[0][0]}"
        yield Finding("integrity", "failed", found, "another program changed the file: restore a backup")
    elif os.access(db, os.W_OK) and not isinstance(connection, UnlockedConnection):
        yield Finding("integrity", "ok", "every page, every value and every reference is sound")
    else:
        found = "every page and every reference is sound; values were not checked, as the file is read-only"
        yield Finding("integrity", "ok", found)


def space(db: Path, connection: Connection) -> Iterator[Finding]:
    wal = Path(os.path.realpath(db) + "-wal")  # next to the file that a link points to
    wal_bytes = size_or_zero(wal)
    size = f"{megabytes(db.stat().st_size)}, WAL {megabytes(wal_bytes)}"
    free = shutil.disk_usage(wal.parent).free
    found = f"{size}; {megabytes(free)} free on the disk"
    if wal_bytes > max(256 << 20, db.stat().st_size):
        yield Finding("space", "warning", found, "a reader keeps the WAL from shrinking: stop long-running readers")
    elif free < LOW_SPACE_BYTES:
        yield Finding(
            "space",
            "warning",
            found,
            "free some space, or keep fewer reports: see docs/explanation/store.md, Retention",
        )
    else:
        yield Finding("space", "ok", found)


def workers(db: Path, connection: Connection) -> Iterator[Finding]:
    known = view_rows(connection, "worker_health")
    stale = [row for row in known if row["status"] == "stale"]
    yield Finding("workers", "ok", f"{len(known)} known, {len(known) - len(stale)} active within the hour")
    for row in stale[:MOST_NAMED]:  # the most recently active come first
        found = f"last active {row['last_seen_at']} UTC"
        advice = "restart it, or ignore this if it was retired"
        yield Finding(f"worker {row['worker_id']}", "warning", found, advice)
    if len(stale) > MOST_NAMED:
        found = f"{len(stale) - MOST_NAMED} more have been stale for longer"
        yield Finding("workers", "warning", found, "the view worker_health lists them all")
    refused = [row for row in known if row["num_refused"] > max(10, row["num_reports"] // 100)]
    for row in refused[:MOST_NAMED]:
        found = f"{row['num_refused']} of its reports were refused"
        yield Finding(f"worker {row['worker_id']}", "warning", found, "see the controller's log for the reason")


def isolated(db: Path, connection: Connection) -> Iterator[Finding]:
    """Workers whose reports differ from the others', and that were therefore isolated."""
    query = """SELECT detail, count(*) AS times, strftime('%Y-%m-%d %H:%M', max(detected_at), 'unixepoch') AS last
      FROM drift_events WHERE factor = 'worker' AND detail NOT LIKE '% agrees with %'
        AND detected_at > (SELECT max(last_seen_at) FROM workers) - ?
      GROUP BY detail ORDER BY max(detected_at) DESC LIMIT ?"""
    for row in connection.execute(query, (ISOLATED_WITHIN_S, MOST_NAMED)).fetchall():
        often = f", {row['times']} times" if row["times"] > 1 else ""
        yield Finding("isolated workers", "warning", f"{row['detail']} ({row['last']} UTC{often})", ISOLATED_ADVICE)


def slower(db: Path, connection: Connection) -> Iterator[Finding]:
    """Batch ranges at which the learned arms were slower than the baseline in the last day."""
    newest = [row.trial for row in trials(connection, time.time() - DAY_S)]
    for row in document_of(newest)["by_batch_size"]:
        if row["gain_high"] is not None and row["gain_high"] < 1.0:
            low, high = row["batch_min"], row["batch_max"]
            found = (
                f"the learned arms made {row['gain']:.3f} ({interval_text(row)}) of the baseline's tokens per second"
            )
            used = (
                "the baseline is used there now"
                if row["in_use"] == "baseline"
                else "hold the baseline with `speclen hold`"
            )
            yield Finding(f"batch {low}-{high}", "warning", found, used)


def given_up(db: Path, connection: Connection) -> Iterator[Finding]:
    query = """SELECT kind, sum(num_rows) AS num_rows, max(detail) AS detail,
      strftime('%Y-%m-%d %H:%M', max(happened_at), 'unixepoch') AS last FROM store_events GROUP BY kind"""
    advice = {
        "reports_dropped": "the disk was full for a long time: free some space; what was learned from them is kept",
        "rows_refused": "the controller wrote rows that violate the schema: please report this",
        "state_set_aside": "it is learned again; the old content is kept in store_events",
        "commits_missing": "their reports are lost; workers resend what they still hold",
    }
    rows: list[Any] = connection.execute(query).fetchall()
    if not rows:
        yield Finding("losses", "ok", "no row was ever dropped")
    for row in rows:
        found = f"{row['num_rows']} rows, last at {row['last']} UTC: {row['detail']}"
        yield Finding(
            row["kind"].replace("_", " "), "warning", found, advice.get(row["kind"], "see the controller's log")
        )


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def report(findings: list[Finding]) -> Table:
    styles = {"ok": "green", "warning": "yellow", "failed": "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        words = (
            f"{finding.found}. {finding.advice[:1].upper()}{finding.advice[1:]}." if finding.advice else finding.found
        )
        table.add_row(Text(finding.status, style=styles[finding.status]), finding.check, words)
    return table
