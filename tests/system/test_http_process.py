"""A real worker process: HTTP beside gRPC, and a stream that is under way when it is asked to stop."""

import json
import signal

import httpx
import pytest

from speclen.v1 import generation_pb2 as pb
from tests.support.addresses import free_address
from tests.support.fleet import PROMPT, Fleet, generate


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    for child in reversed(fleet.children):
        child.stop(timeout_s=20.0)


def test_both_edges_serve_and_a_stream_ends_before_the_worker_does(fleet):
    http = free_address()
    options = ("--controller", "", "--http-listen", http, "--served-model-name", "pair")
    worker = fleet.worker("bundled:target", "bundled:draft", *options)
    worker.wait_until_serving(120)
    body = {"model": "pair", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    url = f"http://{http}/v1/completions"
    text = httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"]
    sampling = pb.SamplingParams(max_tokens=300, ignore_eos=True)
    assert generate(worker.address, sampling_params=sampling)[-1].complete.text == text

    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        worker.process.send_signal(signal.SIGTERM)
        events += [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1] if event]
    assert "".join(pieces) == text
    assert worker.process.wait(30) == 0
    assert "Traceback" not in worker.log_file.read_text()
