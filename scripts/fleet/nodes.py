"""Several Ray nodes on one machine, and `speclen up --ray` on them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from speclen.cli.support.client import Client
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

# One thread a worker: the machine has few cores, and all nodes share them.
OF_ALL = {"SPECLEN_WORKER_THREADS": "1"}
KINDS = {"openvino": {"SPECLEN_WORKER_BACKEND": "openvino"}, "torch": {"SPECLEN_WORKER_BACKEND": "torch"}}
START_S = 240.0


def make_nodes() -> tuple[Cluster, list[Any]]:
    """A head without workers, and a node of each kind with room for one worker."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    return cluster, [add_node(cluster, kind) for kind in KINDS]


def add_node(cluster: Cluster, kind: str) -> Any:
    return cluster.add_node(num_cpus=1, env_vars={**OF_ALL, **KINDS[kind]})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Up:
    """A running `speclen up --ray`."""

    process: subprocess.Popen[bytes]
    address: str
    http: str
    data_dir: Path
    log: Path
    client: Client | None = None

    @classmethod
    def start(cls, ray_address: str, folder: Path, workers: int, max_workers: int, rows: int) -> Up:
        """Raises RuntimeError with the last words where it does not serve."""
        address, http, log = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", folder / "up.log"
        command = [sys.executable, "-m", "speclen.cli.app", "up", "--ray", ray_address, "--workers", str(workers)]
        command += ["--max-workers", str(max_workers), "--max-batch-size", str(rows)]
        command += ["--listen", address, "--http-listen", http, "--data-dir", str(folder / "data")]
        command += ["--backup-to", str(folder / "backups"), "--backup-every-s", "5"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        up = cls(process, address, http, folder / "data", log)
        up.wait_until_serving()
        return up

    def wait_until_serving(self) -> None:
        deadline = time.monotonic() + START_S
        while " generate " not in self.log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"speclen up --ray did not serve: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        self.client = Client(token_file=self.data_dir / "ray.token")

    @property
    def token(self) -> str:
        return (self.data_dir / "ray.token").read_text().strip()

    @property
    def database(self) -> Path:
        return self.data_dir / "speclen.db"

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def look(self) -> pb.GetServerInfoResponse:
        """GetServerInfo of the worker with the fewest requests. Raises grpc.RpcError."""
        assert self.client is not None
        with self.client.channel(self.address) as channel:
            answer: pb.GetServerInfoResponse = rpc.GenerationServiceStub(channel).GetServerInfo(
                pb.GetServerInfoRequest(), timeout=5
            )
            return answer


def node_of(process_id: int, nodes: list[Any]) -> Any:
    """The simulated node that a worker runs on: its raylet started the worker's process."""
    parent = int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])
    (found,) = (node for node in nodes if parent in [each.process.pid for each in node.all_processes.get("raylet", [])])
    return found


def end_process(process_id: int) -> None:
    """As a crash would: SIGKILL."""
    os.kill(process_id, signal.SIGKILL)
