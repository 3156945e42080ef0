"""A controller whose disk is full goes on serving and learning, says so, and recovers by itself when there is room."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.v1 import control_pb2 as pb
from tests.support.kill_harness import ControllerProcess, ReportingWorker
from tests.support.store_rows import rows

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB that can be filled up."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def health(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status


def wait_for(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def controller(small_disk, tmp_path):
    controller = ControllerProcess(small_disk / "s.db", log=tmp_path / "controller.log")
    yield controller
    controller.process.kill()
    controller.process.wait()


def test_a_full_disk_stops_nothing_but_the_acknowledgements(small_disk, tmp_path, controller):
    address = controller.wait_until_serving()
    key = pb.ContextKey(target="t", draft="d", device="cpu", dtype="float32")
    worker = ReportingWorker(1, key, random.Random(1), max_unacknowledged=1_000_000)
    reporting = threading.Thread(target=worker.report_until_broken, args=(address,), daemon=True)
    reporting.start()
    wait_for(lambda: worker.num_acknowledged > 100)
    assert health(address, "speclen.store") == SERVING

    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    wait_for(lambda: health(address, "speclen.store") == NOT_SERVING)
    assert health(address, "") == SERVING
    acknowledged, sent = worker.num_acknowledged, worker.last_seq
    wait_for(lambda: worker.last_seq > sent + 200)
    assert worker.num_acknowledged == acknowledged, "nothing is durable while the disk is full"

    ballast.unlink()
    wait_for(lambda: health(address, "speclen.store") == SERVING)
    worker.finishing = True
    reporting.join(20)
    assert worker.num_acknowledged == worker.last_seq
    assert controller.end(signal.SIGTERM) == 0
    assert rows(small_disk / "s.db", "SELECT count(*), count(DISTINCT seq), max(seq) FROM step_reports") == [
        (worker.last_seq,) * 3
    ]
    assert rows(small_disk / "s.db", "PRAGMA integrity_check") == [("ok",)]
    said = (tmp_path / "controller.log").read_text()
    assert "learning goes on in memory" in said
    assert "takes commits again" in said
