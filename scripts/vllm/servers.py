"""The controller and vLLM as processes of their own, started and ended by scripts/vllm_check."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READY_S = 900.0  # vLLM takes one to five minutes to start, by how busy the machine is
MAX_BATCH = 32
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running vLLM."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def log_lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if word in line]


@contextlib.contextmanager
def controller(folder: Path, port: int, policy: str = "adaptive") -> Iterator[Path]:
    """A controller until the block ends; its database, which the adaptive one keeps between blocks."""
    database = folder / f"{policy.replace(':', '-')}.db"
    command = [sys.executable, "-m", "speclen.cli.app", "controller", "--listen", f"127.0.0.1:{port}"]
    command += ["--db", str(database), "--policy", policy]
    with (folder / "controller.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for_port(port, process)
        yield database
    finally:
        end(process)


@contextlib.contextmanager
def vllm(
    python: str, folder: Path, name: str, speculative: dict[str, object], dtype: str, controller_port: int = 0
) -> Iterator[Server]:
    """`vllm serve` with the bundled pair's weights until the block ends. controller_port: 0 for vLLM without speclen."""
    port = free_port()
    weights = folder / "weights"
    given = {"method": "draft_model", "model": str(weights / "draft")} | speculative
    # The build for CPUs is named otherwise than what `vllm serve` asks for, so its server is started as a module.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights / "target")]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-num-seqs", str(MAX_BATCH), "--max-model-len", "1024", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(given)]
    environment = os.environ | CPU
    if controller_port:
        command += ["--scheduler-cls", "speclen.integrations.vllm.Scheduler"]
        environment["SPECLEN_CONTROLLER"] = f"127.0.0.1:{controller_port}"
    path = folder / f"vllm-{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", path)
    try:
        wait_for_health(server)
        yield server
    finally:
        end(process)


def wait_for_health(server: Server) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"vLLM ended while it started: see {server.log}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{server.address}/health", timeout=5).close()
            return
        time.sleep(1.0)
    raise RuntimeError(f"vLLM was not ready within {READY_S:g} s: see {server.log}")


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the controller did not come up on port {port}: see its log")


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
