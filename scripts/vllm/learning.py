"""A changing load on vLLM with speclen: lengths by batch size over time, and the table that came of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from load import closed_load
from report import Report
from servers import Server

from speclen.console.database import reading
from speclen.store.queries import view_rows

WAVES = (1, 4, 16, 2, 8, 1, 16, 4, 1, 16)  # clients at once, one wave after the other
LOOK_S = 2.0  # between two looks into the database


def learn(report: Report, server: Server, database: Path, prompts: Sequence[str], wave_s: float) -> None:
    """Drive the load; say which lengths were in use when, and what was learned."""
    seen: list[tuple[float, int, dict[str, int]]] = []
    waves = {"now": 0}
    ended = threading.Event()
    watcher = threading.Thread(target=watch, args=(database, waves, seen, ended))
    watcher.start()
    try:
        for clients in WAVES:
            waves["now"] = clients
            closed_load(server.address, prompts, clients, wave_s)
    finally:
        ended.set()
        watcher.join()
    report.say("", "## Lengths by batch size over time", "")
    buckets = sorted({name for _, _, lengths in seen for name in lengths}, key=lambda name: int(name.partition("-")[0]))
    rows = []
    for at, clients, lengths in changes(seen):
        rows.append([f"{at:.0f}", str(clients), *(str(lengths.get(name, "")) for name in buckets)])
    report.table(["s", "clients", *buckets], rows)
    report.say("", "## The learned table", "", "`speclen tables`:", "", "```")
    command = [sys.executable, "-m", "speclen.cli.app", "tables", "--db", str(database)]
    report.say(*subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip().splitlines(), "```")


def watch(
    database: Path, waves: dict[str, int], seen: list[tuple[float, int, dict[str, int]]], ended: threading.Event
) -> None:
    """Look now and then which lengths are in use."""
    began = time.monotonic()
    while not ended.wait(LOOK_S):
        with reading(database) as connection:
            rows = view_rows(connection, "current_choice")
        seen.append(
            (time.monotonic() - began, waves["now"], {r["batch_bucket"]: r["speculation_length"] for r in rows})
        )


def changes(seen: Sequence[tuple[float, int, dict[str, int]]]) -> list[tuple[float, int, dict[str, int]]]:
    """The first look of every wave, and those at which a length had changed."""
    kept: list[tuple[float, int, dict[str, int]]] = []
    for each in seen:
        if not kept or each[1:] != kept[-1][1:]:
            kept.append(each)
    return kept
