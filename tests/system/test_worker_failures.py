"""A worker whose engine has ended answers every request with an error and exits; other tasks are restarted."""

import json
import math
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from speclen.cli.support.processes import Child
from speclen.process.supervision import start_tied
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.waiting import PATIENCE_S, until

SCRIPT = Path(__file__).parents[1] / "support" / "failing_worker.py"


@pytest.fixture
def start(folders, tmp_path):
    children: list[Child] = []

    def start_one(part: str, *options: str) -> Child:
        address = free_address()
        models = ["--target", folders[0], "--draft", folders[1], "--device", "cpu"]
        child = Child("worker", ["worker"], address, tmp_path / "log")
        with child.log_file.open("wb") as log:
            child.process = start_tied(
                [sys.executable, str(SCRIPT), part, "worker", "--listen", address, *models, *options],
                stdout=log,
                stderr=log,
            )
        children.append(child)
        child.wait_until_serving(120)
        return child

    yield start_one
    for child in children:
        child.stop(timeout_s=10.0)


def test_a_dead_engine_ends_requests_with_an_error_and_the_process_at_once(start):
    http = free_address()
    worker = start("engine", "--controller", "", "--http-listen", http, "--drain-timeout-s", "600")
    place = ("127.0.0.1", int(http.rpartition(":")[2]))

    def ask_over_http() -> httpx.Response:
        return httpx.post(f"http://{http}/v1/completions", json={"prompt": "a"}, timeout=PATIENCE_S)

    with (
        httpx.Client(base_url=f"http://{http}", timeout=PATIENCE_S) as idle,
        socket.create_connection(place) as slow,
        ThreadPoolExecutor(1) as pool,
        grpc.insecure_channel(worker.address) as channel,
    ):
        assert idle.get("/health").status_code == 200
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        asked = pool.submit(ask_over_http)
        with pytest.raises(grpc.RpcError) as raised:
            list(rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="a"), timeout=PATIENCE_S))
        assert worker.process.wait(PATIENCE_S) == 1
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    answer = asked.result()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "engine_failed")
    for words in (raised.value.details(), error["message"]):
        assert "the engine has failed: MemoryError: no room" in words
    lines = worker.log_file.read_text().splitlines()
    assert "Traceback" not in "".join(lines)
    assert sum("the worker can no longer serve and ends" in line for line in lines) == 1


def number(page: str, sample: str) -> float:
    """Value of a sample, given as a regular expression, on the page at this address; NaN while it is not there."""
    found = re.search(rf"^{sample} (\S+)$", httpx.get(f"http://{page}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else math.nan


def test_a_worker_without_a_controller_bounds_its_reports(start):
    page = free_address()
    worker = start("few", "--controller", "", "--metrics-listen", page)
    with grpc.insecure_channel(worker.address) as channel:
        sampling = pb.SamplingParams(max_tokens=60, ignore_eos=True)
        list(rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="a", sampling_params=sampling)))
    until(lambda: number(page, r"speclen_decode_steps_total\{.*\}") > 10)
    until(lambda: number(page, r"speclen_reports_buffered\{.*\}") <= 3)


def test_an_engine_that_does_not_stop_is_abandoned(start):
    worker = start("hang", "--controller", "", "--drain-timeout-s", "0.1")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 1
    assert "has not stopped" in worker.last_line()


def test_failing_reporting_is_restarted_and_counted_while_the_worker_serves(start):
    page = free_address()
    worker = start("reporting", "--controller", free_address(), "--metrics-listen", page)
    until(lambda: number(page, r'speclen_part_failures_total\{.*part="reporting"\}') >= 2)
    assert worker.is_serving()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 0
    said = worker.log_file.read_text()
    assert "Traceback" not in said
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    restarts = [event for event in events if event["event"] == "a part has ended and is restarted"]
    assert len(restarts) >= 2
    assert {event["level"] for event in restarts} == {"error"}
    assert "ZeroDivisionError: sabotage (failing_worker.py:" in restarts[0]["reason"]
