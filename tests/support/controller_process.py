"""A `speclen controller` in a process of its own, and reports to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from speclen.cli.support.processes import Child
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.control_fakes import group, registration


def start(*options: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "speclen.cli.app", "controller", "--listen", "127.0.0.1:0", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def address_of(process: subprocess.Popen) -> str:
    line = process.stdout.readline()
    assert line.startswith("speclen controller serving on 127.0.0.1:"), process.stderr.read()
    return line.split("serving on ")[1].split(",")[0]


def report_some(address: str, last_seq: int) -> None:
    """Send reports 1 to last_seq and wait until they are durable."""
    with grpc.insecure_channel(address) as channel:
        stub = rpc.ControlServiceStub(channel)
        stub.RegisterWorker(registration(), timeout=30)
        for answer in stub.StreamReports(iter([group(1, last_seq)]), timeout=30):
            if answer.durable_seq == last_seq:
                return
    raise AssertionError("never durable")


@contextmanager
def running_controller(folder: Path, *options: str, run_id: str = "") -> Iterator[Child]:
    """A controller that keeps its database in the folder, stopped at the end."""
    folder.mkdir(exist_ok=True)
    address = free_address()
    arguments = ["controller", "--listen", address, "--data-dir", str(folder), *options]
    child = Child("controller", arguments, address, folder / "log")
    if run_id:
        child.arguments += ["--run-id", run_id]
    child.start()
    try:
        child.wait_until_serving(30)
        yield child
    finally:
        child.stop(20)
