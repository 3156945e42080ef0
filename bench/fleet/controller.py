"""`speclen bench controller` and `bench fleet`: a controller on a core of its own, loaded from the others."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from speclen.bench.fleet.load import Load, Throughput, load_of, throughput
from speclen.bench.spread import Spread, figure, spread
from speclen.cli.support.errors import UserError
from speclen.store.connection import sqlite3
from speclen.worker.models.devices import processor_name

GROUP = 20  # steps in a message of a fleet's worker: half a second's
JSON = typer.Option(False, "--json", help="Print JSON.")


class ControllerProcess:
    """A controller of its own, on one core where that can be arranged."""

    def __init__(self, store: list[str], core: int | None) -> None:
        arguments = ["--listen", "127.0.0.1:0", "--max-streams", "16384", *store]
        command = [sys.executable, "-m", "speclen.cli.app", "controller", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "serving on " not in line:
            raise UserError("the controller did not start: run `speclen controller` to see why")
        self.address = line.split("serving on ")[1].split(",")[0].strip()
        if core is not None:
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                os.sched_setaffinity(int(thread), {core})

    def cpu_s(self) -> float:
        """Processor time so far, user and system, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def controller_process(storage: bool) -> Iterator[ControllerProcess]:
    """Start a controller and give it the first core alone; this process keeps the others."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if len(cores) > 1 else None
    with tempfile.TemporaryDirectory(prefix="speclen-bench-") as folder:
        process = ControllerProcess(["--db", f"{folder}/bench.db"] if storage else ["--in-memory"], core)
        if core is not None:
            os.sched_setaffinity(0, set(cores[1:]))
        try:
            yield process
        finally:
            os.sched_setaffinity(0, set(cores))
            process.stop()


def controller(
    workers: int = typer.Option(64, min=1, max=8192, help="Workers."),
    group: int = typer.Option(64, min=1, max=1024, help="Reports in a message, when as many are sent as are taken."),
    reports: int = typer.Option(500_000, min=1, help="Reports per repeat, all workers together."),
    seconds: float = typer.Option(10.0, min=1.0, help="Length of the run for round trips."),
    warm_up_s: float = typer.Option(2.0, min=0.1, help="Seconds of warm-up, not counted."),
    repeats: int = typer.Option(3, min=1, help="Repeats, interleaved between storage on and off."),
    as_json: bool = JSON,
) -> None:
    """Measure reports a second until durable, then round trips of single reports, with and without the database.

    Example: speclen bench controller --workers 64 --group 64
    """
    found: dict[str, list[tuple[Throughput, Load]]] = {"on": [], "off": []}
    for repeat in range(repeats):
        for storage, measured in found.items():
            print(f"repeat {repeat + 1} of {repeats}, storage {storage}", file=sys.stderr, flush=True)
            with controller_process(storage == "on") as process:
                most = asyncio.run(throughput(process, workers, group, reports, repeat))
                measured.append((most, asyncio.run(load_of(process, workers, 1, warm_up_s, seconds))))
    storages = {storage: summary(measured) for storage, measured in found.items()}
    if as_json:
        rows = {storage: {name: asdict(value) for name, value in mine.items()} for storage, mine in storages.items()}
        print(json.dumps({"machine": machine_facts(), "storage": rows}, indent=2))
    else:
        show_controller(storages)


def summary(measured: list[tuple[Throughput, Load]]) -> dict[str, Spread]:
    """Medians with the least and greatest of the repeats."""
    values: dict[str, list[float]] = {
        "reports_per_s": [most.reports_per_s for most, _ in measured],
        "cpu_us_per_report": [most.cpu_us_per_report for most, _ in measured],
        "round_trip_p50_ms": [load.trip_p50_ms for _, load in measured],
        "round_trip_p99_ms": [load.trip_p99_ms for _, load in measured],
        "busy": [load.busy for _, load in measured],
    }
    return {name: spread(each) for name, each in values.items()}


def show_controller(storages: dict[str, dict[str, Spread]]) -> None:
    table = Table("", *(f"storage {storage}" for storage in storages), title="median (least to most)")
    for name in storages["on"]:
        table.add_row(name, *(str(mine[name]) for mine in storages.values()))
    Console().print(table)


def fleet(
    workers: int = typer.Option(
        1000, min=1, max=16_384, help="Workers of the largest fleet; a tenth, a hundredth too."
    ),
    seconds: float = typer.Option(10.0, min=1.0, help="Length of a measurement."),
    warm_up_s: float = typer.Option(10.0, min=0.1, help="Seconds of warm-up, not counted."),
    storage: bool = typer.Option(True, help="With a database."),
    as_json: bool = JSON,
) -> None:
    """Measure a controller under fleets of simulated workers, each of 40 steps a second, sampled as it asks.

    Example: speclen bench fleet --workers 1000
    """
    loads = []
    for size in sorted({max(workers // 100, 1), max(workers // 10, 1), workers}):
        print(f"{size} workers", file=sys.stderr, flush=True)
        with controller_process(storage) as process:
            loads.append(asdict(asyncio.run(load_of(process, size, GROUP, warm_up_s, seconds))))
    if as_json:
        print(json.dumps({"machine": machine_facts(), "loads": loads}, indent=2))
        return
    table = Table("", *(str(load["num_workers"]) for load in loads))
    for name in loads[0]:
        table.add_row(name, *(figure(load[name]) for load in loads))
    Console().print(table)


def machine_facts() -> dict[str, Any]:
    """Facts that the figures depend on; without torch, whose import would disturb the measurement."""
    packages = {name: version(name) for name in ("grpcio", "protobuf", "numpy")}
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        **packages,
        "sqlite": sqlite3.sqlite_version,
    }
