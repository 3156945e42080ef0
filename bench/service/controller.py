"""`speclen bench controller`: how many reports one core takes, and how long a worker waits for an answer."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from speclen.bench.service.swarm import RoundTrips, round_trips, throughput
from speclen.bench.spread import Spread, spread
from speclen.cli.support.errors import UserError
from speclen.store.connection import sqlite3

STORAGES = ("sqlite", "off")


@dataclass(slots=True)
class Measured:
    """One kind of storage. cpu_us_per_report: processor time of the controller, all threads, per report.

    busy: share of one core that the controller used during the round-trip run.
    """

    reports_per_s: list[float] = field(default_factory=list)
    cpu_us_per_report: list[float] = field(default_factory=list)
    trips: list[RoundTrips] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


class ControllerProcess:
    """A controller of its own, on one core where that can be arranged."""

    def __init__(self, storage: str, folder: Path, core: int | None) -> None:
        store = ["--db", str(folder / "bench.db")] if storage == "sqlite" else ["--in-memory"]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "speclen.cli.app",
                "controller",
                "--listen",
                "127.0.0.1:0",
                "--max-streams",
                "16384",
                "--metrics-listen",
                "127.0.0.1:0",
                *store,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "serving on " not in line:
            raise UserError("the controller did not start: run `speclen controller` to see why")
        self.address = line.split("serving on ")[1].split(",")[0]
        self.metrics = line.split("metrics ")[1].strip()
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
def controller_process(storage: str, pin: bool) -> Iterator[ControllerProcess]:
    """Starts a controller and gives it the first core alone; this process keeps the others."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if pin and len(cores) > 1 else None
    with tempfile.TemporaryDirectory(prefix="speclen-bench-") as folder:
        process = ControllerProcess(storage, Path(folder), core)
        if core is not None:
            os.sched_setaffinity(0, set(cores[1:]))
        try:
            yield process
        finally:
            os.sched_setaffinity(0, set(cores))
            process.stop()


def measure(measured: Measured, storage: str, options: dict[str, Any], seed: int) -> None:
    """One repeat: a fresh controller, first as many reports as it takes, then paced ones."""
    with controller_process(storage, options["pin"]) as process:
        start = 0.0, 0.0

        def started() -> None:
            nonlocal start
            start = process.cpu_s(), time.perf_counter()

        num, seconds = asyncio.run(
            throughput(process.address, options["workers"], options["group"], options["reports"], seed, started)
        )
        measured.cpu_us_per_report.append(1e6 * (process.cpu_s() - start[0]) / num)
        measured.reports_per_s.append(num / seconds)
        trips = asyncio.run(
            round_trips(
                process.address,
                options["paced_workers"],
                options["steps_per_s"],
                options["seconds"],
                seed,
                options["warm_up_s"],
                started,
            )
        )
        measured.busy.append((process.cpu_s() - start[0]) / (time.perf_counter() - start[1]))
        measured.trips.append(trips)


def summary(measured: Measured) -> dict[str, Any]:
    """Medians with the least and greatest of the repeats."""

    def of(values: list[float]) -> dict[str, float | int]:
        return asdict(spread(values))

    return {
        "reports_per_s": of(measured.reports_per_s),
        "cpu_us_per_report": of(measured.cpu_us_per_report),
        "reports_per_core_s": of([1e6 / value for value in measured.cpu_us_per_report]),
        "round_trip_p50_ms": of([trip.p50_ms for trip in measured.trips]),
        "round_trip_p99_ms": of([trip.p99_ms for trip in measured.trips]),
        "round_trip_p999_ms": of([trip.p999_ms for trip in measured.trips]),
        "round_trips": sum(trip.num for trip in measured.trips),
        "busy": of(measured.busy),
    }


def controller(
    workers: int = typer.Option(64, min=1, max=8192, help="Workers that send groups as fast as they are taken."),
    group: int = typer.Option(64, min=1, max=1024, help="Reports in a message."),
    reports: int = typer.Option(500_000, min=1, help="Reports per repeat, all workers together."),
    paced_workers: int = typer.Option(64, min=1, max=1024, help="Workers of the round-trip run."),
    steps_per_s: float = typer.Option(40.0, min=0.1, help="Steps a second of each of them, reported one by one."),
    seconds: float = typer.Option(10.0, min=1.0, help="Length of a round-trip run."),
    warm_up_s: float = typer.Option(2.0, min=0.0, help="The same before it, not counted."),
    repeats: int = typer.Option(3, min=1, help="Repeats, interleaved between storage on and off."),
    seed: int = typer.Option(0, min=0, help="Seed of the simulated steps."),
    pin: bool = typer.Option(True, help="Give the controller one core of its own."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure a controller over real gRPC with simulated workers in another process, with and without its database.

    Example: speclen bench controller --workers 64 --group 64
    """
    options = dict(locals())
    results = {storage: Measured() for storage in STORAGES}
    for repeat in range(repeats):
        for storage in STORAGES:
            print(f"repeat {repeat + 1} of {repeats}, storage {storage}", file=sys.stderr, flush=True)
            measure(results[storage], storage, options, seed + repeat)
    document = {
        "machine": machine_facts(),
        "options": {name: value for name, value in options.items() if name != "as_json"},
        "storage": {storage: summary(measured) for storage, measured in results.items()},
    }
    print(json.dumps(document, indent=2) if as_json else as_text(document))


def machine_facts() -> dict[str, Any]:
    """Facts that the figures depend on; without torch, whose import would disturb the measurement."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "protobuf": version("protobuf"),
        "numpy": version("numpy"),
        "sqlite": sqlite3.sqlite_version,
    }


def as_text(document: dict[str, Any]) -> str:
    """A table for people: median, and least to greatest in brackets."""
    rows = (
        ("reports/s until durable", "reports_per_s", "{:,.0f}"),
        ("controller CPU a report, µs", "cpu_us_per_report", "{:.2f}"),
        ("reports per core-second", "reports_per_core_s", "{:,.0f}"),
        ("round trip p50, ms", "round_trip_p50_ms", "{:.2f}"),
        ("round trip p99, ms", "round_trip_p99_ms", "{:.2f}"),
        ("round trip p99.9, ms", "round_trip_p999_ms", "{:.2f}"),
        ("of one core, at that rate", "busy", "{:.0%}"),
    )
    lines = [f"{'':30}{'storage on':>32}{'storage off':>32}"]
    for title, key, form in rows:
        cells = [brackets(Spread(**document["storage"][storage][key]), form) for storage in STORAGES]
        lines.append(f"{title:30}{cells[0]:>32}{cells[1]:>32}")
    facts = document["machine"]
    lines.append(f"{facts['processor']}, {facts['cores']} cores, load average {facts['load_average']}")
    return "\n".join(lines)


def brackets(value: Spread, form: str) -> str:
    return f"{form.format(value.median)} [{form.format(value.low)}, {form.format(value.high)}]"
