"""A real worker gives the same text over HTTP and gRPC, and finishes running requests after SIGTERM."""

import json
import signal

import grpc
import httpx

from speclen.cli.support.processes import Child
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.waiting import PATIENCE_S

PROMPT = "def add(a, b):\n    return"
NUM_TOKENS = 300


def test_both_edges_serve_and_their_streams_end_before_the_worker_does(tmp_path):
    """Both streams are complete although the worker receives SIGTERM in the middle."""
    address, http = free_address(), free_address()
    models = ["--target", "bundled:target", "--draft", "bundled:draft", "--device", "cpu"]
    options = ["--listen", address, "--controller", "", "--http-listen", http, "--served-model-name", "pair"]
    worker = Child("worker", ["worker", *options, *models], address, tmp_path / "log")
    worker.start()
    try:
        worker.wait_until_serving(120)
        url = f"http://{http}/v1/completions"
        body = {"model": "pair", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        text = httpx.post(url, json=body, timeout=PATIENCE_S).json()["choices"][0]["text"]
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(text=PROMPT, sampling_params=sampling, stream=True)
        with (
            grpc.insecure_channel(worker.address) as channel,
            httpx.stream("POST", url, json=body | {"stream": True}, timeout=PATIENCE_S) as response,
        ):
            running = rpc.GenerationServiceStub(channel).Generate(request, timeout=PATIENCE_S)
            next(running)
            lines = response.iter_lines()
            events = [next(lines)]
            worker.process.send_signal(signal.SIGTERM)
            *_, last = running
            events += [line for line in lines if line]
        assert worker.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in worker.log_file.read_text()
    finally:
        worker.stop(timeout_s=20.0)
    assert (last.complete.text, last.complete.usage.completion_tokens) == (text, NUM_TOKENS)
    assert events[-1] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1] if event]
    assert "".join(pieces) == text
