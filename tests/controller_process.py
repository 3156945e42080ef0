"""A `speclen controller` in a process of its own, and reports to it."""

from __future__ import annotations

import subprocess
import sys

import grpc
from control_fakes import group, registration

from speclen.v1 import control_pb2_grpc as rpc


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
