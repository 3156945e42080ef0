"""Processes of the `speclen` command, known by their verbs, addresses and exit codes alone."""

import json
import os
import signal
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.transport.supervision import start_tied
from tests.support.addresses import free_address
from tests.support.waiting import PATIENCE_S, until

# Directory of `bundled:target`.
BUNDLED_TARGET = str(resources.files("speclen.worker") / "bundled" / "target")
SPECLEN = (sys.executable, "-m", "speclen.cli.app")


def speclen(*arguments: str, exit_code: int = 0) -> str:
    """Run a verb to its end; returns what it printed on standard output."""
    done = subprocess.run(
        [*SPECLEN, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == exit_code, f"{arguments} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def as_json(*arguments: str, exit_code: int = 0) -> Any:
    """Output of a verb, read as JSON."""
    return json.loads(speclen(*arguments, exit_code=exit_code))


def answers_serving(address: str) -> bool:
    """True if health says SERVING at an address."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


class Server:
    """One serving process. address: where its gRPC service answers."""

    def __init__(self, log: Path, address: str, *arguments: str) -> None:
        self.log, self.address, self.arguments = log, address, arguments
        self.process: Any = None

    def start(self):
        """Start the process; it may be started again after its end."""
        with self.log.open("ab") as log:
            self.process = start_tied(
                [*SPECLEN, *self.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def serving(self):
        """Wait until health says SERVING."""

        def is_serving() -> bool:
            assert self.process.poll() is None, f"ended at its start: {self.log.read_text()}"
            return answers_serving(self.address)

        until(is_serving)
        return self

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        """Clean up after a test, whatever the state of the process."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.kill()


def controller(folder: Path, *options: str):
    """A controller with the database speclen.db in a folder; not started."""
    address = free_address()
    arguments = ("controller", "--listen", address, "--data-dir", str(folder), *options)
    return Server(folder / "controller.log", address, *arguments)


def worker(folder: Path, controller_address: str, *options: str):
    """A worker of the bundled pair in float32; not started."""
    address = free_address()
    models = ("--target", "bundled:target", "--draft", "bundled:draft", "--device", "cpu", "--dtype", "float32")
    arguments = ("worker", "--listen", address, "--controller", controller_address, *models, *options)
    return Server(folder / "worker.log", address, *arguments)


def up(folder: Path):
    """`speclen up` with one worker, whose address is the server's; not started."""
    address = free_address()
    where = ("--listen", address, "--controller", free_address(), "--http-listen", "", "--data-dir", str(folder))
    what = ("--device", "cpu", "--dtype", "float32", "--max-batch-size", "8")
    return Server(folder / "up.log", address, "up", *where, *what)
