"""Serve the bundled pair under a controller that believes in a slow arm, and print what `speclen gain` measures.

    .venv/bin/python scripts/gain_check.py --seconds 600

Exits with 1 unless the baseline, which is faster, is in use at one batch range at least at the end.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import typer

from speclen.cli.app import main as speclen
from speclen.cli.demo import keep_sending
from speclen.cli.support.client import free_port
from speclen.controller.estimator import Estimator
from speclen.records import Choice, Table, parse_arm
from speclen.v1 import generation_pb2_grpc as rpc

START_S = 600.0


def controller(believed: str, arguments: list[str]) -> None:
    """A controller whose estimator always selects one arm, and explores nothing."""
    arm = parse_arm(believed)

    def table(self: Estimator, worker: str = "") -> Table:
        return Table(1, (Choice(1, self.limits.max_batch_size, arm.within(self.limits)),))

    Estimator.table, Estimator.probe = table, lambda *_, **__: None  # type: ignore[method-assign,assignment]
    sys.argv = ["speclen", "controller", *arguments]
    speclen()


def check(
    seconds: float = typer.Option(600.0, help="Seconds of requests."),
    believed: str = typer.Option("draft 8", help="Arm that the controller believes in."),
    baseline: str = typer.Option("fixed:1", help="The worker's baseline."),
    requests: int = typer.Option(8, help="Requests at a time."),
    target: str = typer.Option("bundled:target-60m", help="Model of the worker."),
) -> None:
    """Send requests in a closed loop, then print `gain`, `tables` and `doctor`."""
    with TemporaryDirectory() as folder:
        database, serving, listen = Path(folder) / "speclen.db", free_port("127.0.0.1:0"), free_port("127.0.0.1:0")
        process = multiprocessing.get_context("spawn").Process(
            target=controller, args=(believed, ["--listen", serving, "--db", str(database)])
        )
        process.start()
        run = [sys.executable, "-m", "speclen.cli.app"]
        flags = ["--controller", serving, "--listen", listen, "--target", target, "--baseline", baseline]
        with subprocess.Popen([*run, "worker", *flags]) as worker, grpc.insecure_channel(listen) as channel:
            try:
                grpc.channel_ready_future(channel).result(START_S)
                stub, now = rpc.GenerationServiceStub(channel), time.monotonic()
                with ThreadPoolExecutor(requests) as pool:
                    for first in range(requests):
                        pool.submit(keep_sending, stub, first, requests, "learned", (now, now + seconds), [])
            finally:
                worker.terminate()
                worker.wait()
                process.terminate()
                process.join()
        for verb in ("gain", "tables", "doctor"):
            print(f"\n$ speclen {verb}", flush=True)
            subprocess.run([*run, verb, "--db", str(database)], check=False)
        found = subprocess.run([*run, "gain", "--json", "--db", str(database)], capture_output=True, check=True)
        if not any(row["in_use"] == "baseline" for row in json.loads(found.stdout)["by_batch_size"]):
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(check)
