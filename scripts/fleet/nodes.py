"""Several Ray nodes on one machine, and `speclen up --ray` on them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from ray.cluster_utils import Cluster

from speclen.cli.support.client import Client
from speclen.cli.support.database import reading
from speclen.process.credentials import ClientSecurity
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

START_S = 240.0


def add_node(cluster: Cluster, backend: str) -> Any:
    """A node with room for one worker. It gets one thread: the machine has few cores, and all nodes share them."""
    variables = {"SPECLEN_WORKER_THREADS": "1", "SPECLEN_WORKER_BACKEND": backend}
    return cluster.add_node(num_cpus=1, env_vars=variables)


def node_of(process_id: int, nodes: list[Any]) -> Any:
    """The simulated node that a worker runs on: its raylet started the worker's process."""
    parent = int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])
    (found,) = (node for node in nodes if parent in [each.process.pid for each in node.all_processes.get("raylet", [])])
    return found


def seconds_until(look: Callable[[], Any], limit_s: float) -> float | None:
    """Seconds until look() is true; None if it is not within limit_s. A failed gRPC call counts as false."""
    began = time.monotonic()
    while (taken_s := time.monotonic() - began) < limit_s:
        with contextlib.suppress(grpc.RpcError):
            if look():
                return taken_s
        time.sleep(0.2)
    return None


@dataclass
class Up:
    """A running `speclen up --ray`, with its database and log in a folder."""

    ray_address: str
    folder: Path
    address: str = "127.0.0.1:7180"
    http: str = "127.0.0.1:8100"

    def start(self, workers: int, max_workers: int, rows: int) -> str:
        """Start it, and return its command line once it serves. Raises RuntimeError with the end of its log otherwise."""
        options = ["--workers", str(workers), "--max-workers", str(max_workers), "--max-batch-size", str(rows)]
        where = ["--listen", self.address, "--http-listen", self.http, "--data-dir", str(self.folder)]
        command = [sys.executable, "-m", "speclen.cli.app", "up", "--ray", self.ray_address, *options, *where]
        log = self.folder / "up.log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while " generate " not in log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"speclen up --ray did not serve: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        return f"speclen up --ray ADDRESS {' '.join(options)}"

    @property
    def client(self) -> Client:
        return Client(ClientSecurity(token_file=self.folder / "ray.token"))

    @property
    def token(self) -> str:
        return (self.folder / "ray.token").read_text().strip()

    def count(self, query: str) -> int:
        with reading(self.folder / "speclen.db") as connection:
            return int(connection.execute(query).fetchone()[0])

    def look(self) -> pb.GetServerInfoResponse:
        """GetServerInfo of the worker with the fewest requests. Raises grpc.RpcError."""
        with self.client.channel(self.address) as channel:
            answer: pb.GetServerInfoResponse = rpc.GenerationServiceStub(channel).GetServerInfo(
                pb.GetServerInfoRequest(), timeout=5
            )
            return answer

    def workers(self, wanted: int, looks: int = 4) -> dict[str, pb.GetServerInfoResponse]:
        """Workers that answer at the fleet's address, by name; asked repeatedly until this many have answered."""
        found: dict[str, pb.GetServerInfoResponse] = {}
        for _ in range(looks):
            with contextlib.suppress(grpc.RpcError):
                answer = self.look()
                found[answer.worker.worker_id] = answer
            if len(found) >= wanted:
                break
        return found

    def stop(self) -> int:
        """Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
