"""`speclen bench controller` and `bench fleet`: a controller on a core of its own, loaded from the others."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from speclen.bench.fleet.load import Load, load_of
from speclen.bench.spread import spread
from speclen.cli.support.client import free_port
from speclen.cli.support.processes import Child
from speclen.worker.models.devices import processor_name

STEPS_PER_S = 40.0  # of a worker in a fleet
GROUP, LARGE_GROUP = 20, 64  # steps in a message: of half a second, and where as many are sent as are taken
WARM_UP_S = 5.0
SECONDS = typer.Option(10.0, min=1.0, help="Length of a measurement.")
JSON = typer.Option(False, "--json", help="Print JSON.")


def cpu_s(process_id: int) -> float:
    """Processor time of a process so far, user and system, all threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def controller_process() -> Iterator[tuple[str, int]]:
    """Address and id of a controller with the first core alone; this process keeps the others, if there are any."""
    cores, address = sorted(os.sched_getaffinity(0)), free_port("127.0.0.1:0")
    with tempfile.TemporaryDirectory(prefix="speclen-bench-") as folder:
        arguments = ["controller", "--listen", address, "--max-streams", "16384", "--db", f"{folder}/bench.db"]
        child = Child("controller", arguments, address, Path(folder, "log"), takes_settings=False)
        os.sched_setaffinity(0, cores[:1])  # which the controller inherits
        try:
            child.start()
            os.sched_setaffinity(0, cores[1:] or cores)
            child.wait_until_serving(60.0)
            assert child.process is not None
            yield address, child.process.pid
        finally:
            os.sched_setaffinity(0, cores)
            child.stop(30.0)


def controller(
    workers: int = typer.Option(64, min=1, max=8192, help="Workers."),
    seconds: float = SECONDS,
    repeats: int = typer.Option(3, min=1, help="Repeats, interleaved."),
    as_json: bool = JSON,
) -> None:
    """Measure the most reports a second, then round trips of single reports.

    Example: speclen bench controller --workers 64
    """
    setups = {
        what: partial(measured, workers, group, steps_per_s, seconds)
        for what, group, steps_per_s in (("most", LARGE_GROUP, math.inf), ("single", 1, STEPS_PER_S))
    }
    show(setups, repeats, as_json)


def fleet(
    workers: int = typer.Option(
        1000, min=1, max=16_384, help="Workers of the largest fleet; a tenth, a hundredth too."
    ),
    seconds: float = SECONDS,
    as_json: bool = JSON,
) -> None:
    """Measure a controller under fleets of simulated workers, each of 40 steps a second, sampled as it asks.

    Example: speclen bench fleet --workers 1000
    """
    sizes = sorted({max(workers // 100, 1), max(workers // 10, 1), workers})
    show({f"{size} workers": partial(measured, size, GROUP, STEPS_PER_S, seconds) for size in sizes}, 1, as_json)


def measured(workers: int, group: int, steps_per_s: float, seconds: float) -> Load:
    """Load of a fresh controller."""
    with controller_process() as (address, process_id):
        used = partial(cpu_s, process_id)
        return asyncio.run(load_of(address, used, workers, group, steps_per_s, WARM_UP_S, seconds))


def show(setups: Mapping[str, partial[Load]], repeats: int, as_json: bool) -> None:
    """Measure every setup in turns; print medians with the least and greatest of the repeats."""
    loads: dict[str, list[dict[str, float]]] = {name: [] for name in setups}
    for repeat in range(repeats):
        for name, measure in setups.items():
            print(f"repeat {repeat + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            loads[name].append(asdict(measure()))
    figures = next(iter(loads.values()))[0]
    found = {
        name: {figure: spread([load[figure] for load in mine]) for figure in figures} for name, mine in loads.items()
    }
    if as_json:
        machine = {"processor": processor_name(), "cores": os.cpu_count()}
        rows = {name: {figure: asdict(value) for figure, value in mine.items()} for name, mine in found.items()}
        print(json.dumps({"machine": machine, "loads": rows}, indent=2))
        return
    table = Table("", *found, title="median (least to greatest)")
    for figure in figures:
        table.add_row(figure, *(str(mine[figure]) for mine in found.values()))
    Console().print(table)
