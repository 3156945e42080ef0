"""A changing load on vLLM with speclen: lengths by batch size over time, and the table that came of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from load import closed_load
from servers import Server

from speclen.bench.findings import Report
from speclen.cli.support.database import reading
from speclen.store.queries import view_rows

WAVES = (1, 4, 16, 2, 8, 1, 16, 4, 1, 16)  # clients at once, one wave after the other
SIZES = (1, 2, 4, 8, 16, 32)  # batch sizes whose lengths are shown
LOOK_S = 2.0  # between two looks into the database

# Seconds since the beginning, clients at once, and the length in use at each of SIZES.
Look = tuple[float, int, tuple[int, ...]]


def learn(report: Report, server: Server, database: Path, prompts: Sequence[str], wave_s: float) -> None:
    """Drive the load; say which lengths were in use when, and what was learned."""
    seen: list[Look] = []
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
    rows = [[f"{at:.0f}", str(clients), *map(str, lengths)] for at, clients, lengths in changes(seen)]
    report.table(["s", "clients", *(f"at {size}" for size in SIZES)], rows)
    report.say("", "## The learned table", "", "`speclen tables`:", "", "```")
    command = [sys.executable, "-m", "speclen.cli.app", "tables", "--db", str(database)]
    report.say(*subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip().splitlines(), "```")


def watch(database: Path, waves: dict[str, int], seen: list[Look], ended: threading.Event) -> None:
    """Look now and then which lengths are in use."""
    began = time.monotonic()
    while not ended.wait(LOOK_S):
        with reading(database) as connection:
            rows = view_rows(connection, "current_choice")
        if rows:
            chosen = [next(r for r in rows if r["batch_min"] <= size <= r["batch_max"]) for size in SIZES]
            seen.append((time.monotonic() - began, waves["now"], tuple(r["speculation_length"] for r in chosen)))


def changes(seen: Sequence[Look]) -> list[Look]:
    """The first look of every wave, and those at which a length had changed."""
    kept: list[Look] = []
    for each in seen:
        if not kept or each[1:] != kept[-1][1:]:
            kept.append(each)
    return kept
