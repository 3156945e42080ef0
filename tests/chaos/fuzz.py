"""Random messages to real processes: fields of valid ones set to extremes, or their bytes damaged."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from chaos.fault import Place, fault
from chaos.fleet import SERVING, Fleet
from chaos.load import Load
from chaos.mutation import damaged, mutant
from speclen.v1 import control_pb2 as control
from speclen.v1 import control_pb2_grpc
from speclen.v1 import generation_pb2 as generation
from tests.support.addresses import free_address
from tests.support.control_fakes import PROFILE, group, identity, registration, report
from tests.support.store_rows import rows

CODES = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN", "INTERNAL"}
CODES |= {"UNIMPLEMENTED", "DEADLINE_EXCEEDED", "NOT_FOUND"}
SEQS = itertools.count(1, 3)
NO_MESSAGE = ("Error parsing message", "deserializing")  # in what gRPC says of bytes that are no message
SAMPLING = generation.SamplingParams(
    temperature=0.7, top_p=0.9, top_k=40, max_tokens=16, stop=["\n\n"], stop_token_ids=[3], logit_bias={5: 1.0}, n=2
)
GENERATE = (
    generation.GenerateRequest(request_id="r", text="def f(x):", sampling_params=SAMPLING, stream=True),
    generation.GenerateRequest(tokenized=generation.TokenizedInput(input_ids=[1, 2, 3])),
)
HTTP = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 83\r\n\r\n"
    b'{"model": "bundled:target", "prompt": "def f(x):", "max_tokens": 4, "stream": true}\n'
)


def reports(dice: random.Random) -> control.StreamReportsRequest:
    """Reports that the controller has not seen, of a worker that it knows."""
    first = next(SEQS)
    message = group(first, first + 2)
    message.worker.CopyFrom(identity("reporter"))
    return message


METHODS: dict[str, Callable[[random.Random], Message]] = {
    "/speclen.v1.ControlService/RegisterWorker": lambda dice: registration(),
    "/speclen.v1.ControlService/StreamReports": reports,
    "/speclen.v1.ControlService/ImportProfile": lambda dice: PROFILE,
    "/speclen.v1.GenerationService/Generate": lambda dice: dice.choice(GENERATE),
}


@fault(
    "Controller and worker answer each with a status and stay SERVING; the client gets every token, and what was learned "
    "stays finite."
)
def fuzz(place: Place) -> str:
    """Damaged and extreme messages are sent to a real controller and a real worker over gRPC and HTTP, while a client sends
    requests."""
    front, counts = free_address(), Counter[str]()
    failures: list[BaseException] = []
    with Fleet(place, worker=["--http-listen", front]) as fleet:
        worker, controller = fleet.workers[0], fleet.controller
        register(controller.address, "reporter")
        with Load([worker.address], 2, place.dice.randrange(2**20)) as load:

            def send(seed: int) -> None:
                try:
                    fuzz_addresses(random.Random(seed), place, controller.address, worker.address, front, counts)
                except BaseException as error:
                    failures.append(error)

            threads = [
                threading.Thread(target=send, args=(place.dice.randrange(2**30),), daemon=True) for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(place.seconds + 120)
            assert not any(thread.is_alive() for thread in threads), "a fuzzed call hangs"
        if failures:
            raise failures[0]
        fleet.check_idle()
        assert [program.health() for program in fleet.programs] == [SERVING] * 2, "not SERVING after the fuzz"
        register(controller.address, "honest")
        check_learned(controller.address, "honest")
    refused = rows(fleet.database, "SELECT detail FROM store_events WHERE kind = 'rows_refused'")
    assert not refused, f"the database refused rows: {refused[:1]}"
    strange = set(counts) - CODES - {"HTTP"}
    assert not strange, f"calls ended with {strange}"
    return f"{sum(counts.values()):,} messages: {dict(counts.most_common())}; {load.summary()}"


def register(controller: str, worker_id: str) -> None:
    with grpc.insecure_channel(controller) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        stub.RegisterWorker(registration(worker_id), timeout=10)


def check_learned(controller: str, worker_id: str) -> None:
    """A correct worker's reports are still learned from, and all estimates are finite."""
    with grpc.insecure_channel(controller) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        for seq in range(1, 50):
            request = control.ReportStepRequest(worker=identity(worker_id), report=report(seq))
            assert stub.ReportStep(request, timeout=10).applied_seq == seq, "an honest report is refused"
        tables = stub.GetLearnedTable(control.GetLearnedTableRequest(), timeout=10).tables
    for row in (row for table in tables for row in table.rows):
        assert row.step_ms > 0, row
        assert row.ms_per_token_low <= row.ms_per_token_high < float("inf"), row


def fuzz_addresses(
    dice: random.Random, place: Place, controller: str, worker: str, front: str, counts: Counter[str]
) -> None:
    with grpc.insecure_channel(controller) as to_controller, grpc.insecure_channel(worker) as to_worker:
        for _ in place.rounds(300):
            if dice.random() < 0.2:
                send_http(front, damaged(HTTP, dice))
                counts["HTTP"] += 1
                continue
            method = dice.choice(list(METHODS))
            valid = METHODS[method](dice)
            message = mutant(valid, dice)
            data = damaged(valid.SerializeToString(), dice) if message is None else message.SerializeToString()
            channel = to_worker if "Generate" in method else to_controller
            counts[code_of(channel, method, data)] += 1


def code_of(channel: grpc.Channel, method: str, data: bytes) -> str:
    """The status that a call with these bytes ends with."""
    try:
        if method.endswith("StreamReports"):
            list(channel.stream_stream(method)(iter([data]), timeout=3))
        elif method.endswith("Generate"):
            list(channel.unary_stream(method)(data, timeout=3))
        else:
            channel.unary_unary(method)(data, timeout=3)
    except grpc.RpcError as error:
        code, details = error.code().name, error.details() or ""
    else:
        return "OK"
    is_ours = code in ("UNKNOWN", "INTERNAL") and not any(words in details for words in NO_MESSAGE)
    assert not is_ours, f"{method} failed on {data!r:.300}: {details}"
    return code


def send_http(front: str, data: bytes) -> None:
    """Send it, read the answer, and close."""
    host, _, port = front.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(3)
            answer = connection.recv(65536)
            assert not answer.startswith(b"HTTP/1.1 500"), f"500 for {data!r}"
            while connection.recv(65536):
                pass
        except OSError:
            return
