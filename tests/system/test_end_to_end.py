"""Real processes: a worker drains when it is told to stop; what cannot be done is one sentence and exit code 2."""

import signal
import socket

import grpc
import pytest

from speclen.cli.support.processes import Child
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support import tiny_models
from tests.support.addresses import free_address
from tests.support.fleet import PROMPT, Fleet


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    for child in reversed(fleet.children):
        child.stop(timeout_s=20.0)


def test_a_draining_worker_finishes_what_runs(fleet, tmp_path):
    """Of saved models, whose stream is what its last message says."""
    worker = fleet.worker(*tiny_models.save_pair("gpt2", tmp_path / "gpt2"), "--controller", "")
    worker.wait_until_serving(120)
    with grpc.insecure_channel(worker.address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        sampling = pb.SamplingParams(max_tokens=200, ignore_eos=True)
        running = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=sampling, stream=True), timeout=60)
        first = next(running)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        *chunks, last = first, *running
    assert last.complete.usage.completion_tokens == 200
    assert "".join(each.chunk.text for each in chunks) == last.complete.text
    assert [token for each in chunks for token in each.chunk.token_ids] == list(last.complete.output_ids)
    assert worker.process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["worker", "--target", "/no/such/model"], "/no/such/model"),
        (["worker", "--policy", "fixed:9"], "fixed:9"),
        (["worker", "--policy", "profile"], "--profile"),
        (["worker", "--profile", "/no/such/profile.json"], "/no/such/profile.json"),
        (["generate", "hello", "--speculation", "many"], "'many'"),
        (["generate", "hello", "--worker", "127.0.0.1:1"], "127.0.0.1:1"),
        (["up", "--listen", "7080"], "7080"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, words):
    child = Child("x", arguments, "", tmp_path / "log")
    if arguments[0] == "worker":
        child.arguments = [*arguments, "--listen", free_address(), "--controller", ""]
    child.start()
    assert child.process is not None
    assert child.process.wait(60) == 2
    assert "Traceback" not in child.log_file.read_text()
    assert words in child.last_line()


def test_a_taken_port_is_named(fleet):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        child = fleet.start("worker", ["worker", "--listen", address], address)
        assert child.process is not None
        assert child.process.wait(60) == 2
        assert address in child.last_line()
