"""`speclen up --ray` on a Ray of this machine; needs `pip install 'speclen[ray]'`. More: scripts/fleet_check."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from speclen.cli.support.client import Client
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.store_rows import rows

ray = pytest.importorskip("ray")

SMALL = {"SPECLEN_WORKER_THREADS": "1", "SPECLEN_WORKER_BACKEND": "torch"}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def up(address: str, http: str, data_dir: Path) -> subprocess.Popen[str]:
    places = ["--listen", address, "--http-listen", http, "--data-dir", str(data_dir)]
    command = [sys.executable, "-m", "speclen.cli.app", "up", "--ray", *places, "--max-batch-size", "4"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | SMALL)


def test_a_fleet_serves_at_one_address_learns_and_leaves_nothing(tmp_path):
    address, http = free_address(), free_address()
    first = up(address, http, tmp_path)
    try:
        assert first.stdout is not None
        while "speclen generate" not in (line := first.stdout.readline()):
            assert line or first.poll() is None, first.communicate()[1]
        token = tmp_path / "ray.token"
        with Client(token_file=token).channel(address) as channel:
            request = pb.GenerateRequest(text="def f(", sampling_params=pb.SamplingParams(max_tokens=64))
            *_, last = rpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        key = {"Authorization": f"Bearer {token.read_text().strip()}"}
        body = {"prompt": "def f(", "max_tokens": 64, "temperature": 0}
        whole = httpx.post(f"http://{http}/v1/completions", json=body, headers=key, timeout=60).json()
        assert whole["choices"][0]["text"] == last.complete.text != ""
        assert httpx.post(f"http://{http}/v1/completions", json=body, timeout=60).status_code == 401
        deadline = time.monotonic() + 30
        while not rows(tmp_path / "speclen.db", "SELECT count(*) FROM step_reports")[0][0]:
            assert time.monotonic() < deadline, "nothing was reported"
            time.sleep(0.2)
    finally:
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=90)
    assert first.returncode == 0, errors


def test_a_controller_that_cannot_start_is_one_sentence(tmp_path):
    (tmp_path / "speclen.db").write_text("no database at all" * 100)
    refused = up(free_address(), free_address(), tmp_path)
    _, errors = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "is damaged" in errors
    assert "Traceback" not in errors
