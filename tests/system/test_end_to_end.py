"""Real processes: a worker decodes, reports go to a controller, and what was learned stands in SQLite."""

import signal
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from speclen.cli.support.processes import Child
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from tests.support import tiny_models
from tests.support.addresses import free_address
from tests.support.fleet import PROMPT, Fleet, generate


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    for child in reversed(fleet.children):
        child.stop(timeout_s=20.0)


def rows(database: Path, query: str) -> list[tuple]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def until(condition, timeout_s: float = 60.0):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
    return value


def test_reports_of_real_decoding_become_a_learned_table(fleet):
    fleet.controller().wait_until_serving(30)
    worker = fleet.worker("bundled:target", "bundled:draft", "--max-batch-size", "8")
    worker.wait_until_serving(120)

    sampling = pb.SamplingParams(max_tokens=32, ignore_eos=True)
    with ThreadPoolExecutor(8) as pool:
        plain = pool.submit(generate, worker.address, sampling_params=sampling, speculation=off()).result()
        outputs = [
            pool.submit(generate, worker.address, sampling_params=sampling, stream=index % 2 == 0)
            for index in range(24)
        ]
        completions = [future.result()[-1].complete for future in outputs]

    # Speculating never changes a greedy output, alone or in a batch.
    assert {tuple(c.output_ids) for c in completions} == {tuple(plain[-1].complete.output_ids)}
    assert sum(c.speculation.num_accepted_tokens for c in completions) > 0

    until(
        lambda: rows(fleet.database, "select 1 from learned_table where num_steps > 0 and source in ('online', 'both')")
    )
    best = rows(
        fleet.database, "select batch_bucket, count(*) from learned_table where is_best group by context, batch_bucket"
    )
    assert best
    assert all(count == 1 for _, count in best)


def off() -> pb.Speculation:
    return pb.Speculation(mode=pb.Speculation.MODE_OFF)


def serving_from_a_directory(fleet, folder: Path, family: str, *options: str) -> Child:
    """A worker of saved models, whose stream is what its last message says."""
    worker = fleet.worker(*tiny_models.save_pair(family, folder / family), *options)
    worker.wait_until_serving(120)
    *chunks, last = generate(
        worker.address, sampling_params=pb.SamplingParams(max_tokens=20, ignore_eos=True), stream=True
    )
    assert last.complete.usage.completion_tokens == 20
    assert "".join(r.chunk.text for r in chunks) == last.complete.text
    assert [t for r in chunks for t in r.chunk.token_ids] == list(last.complete.output_ids)
    return worker


def test_a_worker_outlives_its_controller_and_loses_no_report(fleet, tmp_path):
    controller = fleet.controller()
    controller.wait_until_serving(30)
    worker = serving_from_a_directory(fleet, tmp_path, "opt")
    sampling = pb.SamplingParams(max_tokens=40, ignore_eos=True)
    generate(worker.address, sampling_params=sampling)
    until(lambda: rows(fleet.database, "select count(*) from step_reports")[0][0])
    assert controller.process is not None
    controller.process.send_signal(signal.SIGKILL)
    controller.process.wait()

    assert generate(worker.address, sampling_params=sampling)[-1].complete.usage.completion_tokens == 40

    controller.start()
    controller.wait_until_serving(30)
    with grpc.insecure_channel(worker.address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        until(lambda: stub.GetServerInfo(pb.GetServerInfoRequest()).num_reports_buffered == 0)
        num_steps = stub.GetServerInfo(pb.GetServerInfoRequest()).num_steps
    assert rows(fleet.database, "select count(*), count(distinct seq) from step_reports") == [(num_steps, num_steps)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_draining_worker_finishes_what_runs_and_refuses_what_comes(fleet, tmp_path, family):
    worker = serving_from_a_directory(fleet, tmp_path, family, "--controller", "")
    with grpc.insecure_channel(worker.address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        sampling = pb.SamplingParams(max_tokens=200, ignore_eos=True)
        running = stub.Generate(pb.GenerateRequest(text=PROMPT, sampling_params=sampling, stream=True), timeout=60)
        next(running)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        *_, last = running
    assert last.complete.usage.completion_tokens == 200
    assert worker.process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["worker", "--target", "/no/such/model"], "/no/such/model"),
        (["worker", "--policy", "greedy"], "'greedy'"),
        (["worker", "--policy", "fixed:9"], "fixed:9"),
        (["worker", "--policy", "profile"], "--profile"),
        (["worker", "--listen", "nowhere"], "nowhere"),
        (["worker", "--profile", "/no/such/profile.json"], "/no/such/profile.json"),
        (["controller", "--db", "/proc/speclen.db"], "/proc/speclen.db"),
        (["generate", "hello", "--speculation", "many"], "'many'"),
        (["generate", "hello", "--worker", "127.0.0.1:1"], "127.0.0.1:1"),
        (["up", "--listen", "7080"], "7080"),
        (["tables", "--db", "/no/such.db"], "/no/such.db"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, words):
    child = Child("x", arguments, "", tmp_path / "log")
    if arguments[0] == "worker" and "--listen" not in arguments:
        child.arguments = [*arguments, "--listen", free_address(), "--controller", ""]
    child.start()
    assert child.process is not None
    assert child.process.wait(60) == 2
    said = child.log_file.read_text()
    assert "Traceback" not in said
    assert words in child.last_line()


def test_a_taken_port_is_named(fleet, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for verb in ("worker", "controller"):
            child = fleet.start(verb, [verb, "--listen", address, *data_dir(verb, tmp_path)], address)
            assert child.process is not None
            assert child.process.wait(60) == 2
            assert address in child.last_line()


def data_dir(verb: str, folder: Path) -> list[str]:
    return ["--data-dir", str(folder)] if verb == "controller" else []
