"""A million random messages: passed to the services directly, and sent to real processes."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import grpc
from google.protobuf.message import Message

from chaos.fault import Place, fault
from chaos.fleet import SERVING, Fleet
from chaos.load import Load
from chaos.mutation import damaged, mutant
from speclen.controller.config import ControllerConfig
from speclen.controller.service.control_servicer import STATUS
from speclen.controller.service.control_servicer import registration as read_registration
from speclen.controller.service.controller_server import create_service
from speclen.controller.wire.messages import read_profile
from speclen.store.database import Store
from speclen.v1 import control_pb2 as control
from speclen.v1 import generation_pb2 as generation
from speclen.worker.frontend.generation_servicer import to_request, to_request_id
from speclen.worker.requests.request import check_request
from tests.support.addresses import free_address
from tests.support.control_fakes import PROFILE, group, registration, report

VOCABULARY, CONTEXT_LENGTH, MAX_LENGTH = 2048, 1024, 8
GENERATE = generation.GenerateRequest(
    request_id="r",
    text="def f(x):",
    sampling_params=generation.SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, max_tokens=16, stop=["\n\n"], stop_token_ids=[3], logit_bias={5: 1.0}, n=2
    ),
    stream=True,
)
TOKENIZED = generation.GenerateRequest(tokenized=generation.TokenizedInput(input_ids=[1, 2, 3]))
SEEDS: tuple[Message, ...] = (group(1, 3), registration(), PROFILE, GENERATE, TOKENIZED)


class Targets:
    """A controller's service and a worker's checks. Any exception but a refusal is raised."""

    def __init__(self) -> None:
        store = Store.open(Path(mkdtemp(prefix="speclen-fuzz-")) / "speclen.db")
        self.learner = create_service(ControllerConfig(), store, store.load())
        self.num_taken = self.num_refused = self._seq = self._num_reports = 0
        self._register()

    def _register(self) -> None:
        self.worker = self.learner.register(read_registration(registration()))

    def give(self, message: Message, dice: random.Random) -> None:
        """Raises every error that is not a refusal."""
        try:
            if isinstance(message, control.StreamReportsRequest):
                self._report(message)
            elif isinstance(message, control.RegisterWorkerRequest):
                taken = read_registration(message)
                if dice.random() < 0.01:
                    self.learner.register(taken)
            elif isinstance(message, control.ImportProfileRequest):
                read_profile(message)
            else:
                self._generate(message)
        except (ValueError, *STATUS):
            self.num_refused += 1
        else:
            self.num_taken += 1

    def _report(self, message: control.StreamReportsRequest) -> None:
        refused = self.learner.take(self.worker, message.reports)
        self._num_reports += len(message.reports)
        if self._num_reports > 2000:
            self._num_reports = 0
            self.learner.learn(self.worker)
            self._register()
        if refused:
            raise refused[0]

    def _generate(self, message: Message) -> None:
        assert isinstance(message, generation.GenerateRequest)
        request_id = to_request_id(message)
        ids = message.tokenized.input_ids if message.WhichOneof("input") == "tokenized" else [1, 2, 3]
        check_request(to_request(message, request_id, ids), VOCABULARY, CONTEXT_LENGTH, MAX_LENGTH)

    def check(self) -> None:
        """A correct worker's reports are still learned from, and all estimates are finite."""
        worker = self.learner.register(read_registration(registration("honest", epoch=2**61)))
        assert not self.learner.take(worker, [report(seq) for seq in range(1, 50)]), "honest reports are refused"
        self.learner.learn(worker)
        for key in self.learner.registry.contexts:
            for row in self.learner.learned(key)[1]:
                assert row.step_s > 0
                assert row.ms_per_token_low <= row.ms_per_token_high < float("inf")


WANTED = 1_000_000  # messages of a full run
FULL_S = 45.0  # of a share of the time that makes it a full run
CODES = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN", "INTERNAL"}
CODES |= {"UNIMPLEMENTED", "DEADLINE_EXCEEDED", "NOT_FOUND"}
METHODS = {
    "/speclen.v1.ControlService/RegisterWorker": SEEDS[1],
    "/speclen.v1.ControlService/StreamReports": SEEDS[0],
    "/speclen.v1.ControlService/ImportProfile": SEEDS[2],
    "/speclen.v1.GenerationService/Generate": SEEDS[3],
}
HTTP = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 83\r\n\r\n"
    b'{"model": "bundled:target", "prompt": "def f(x):", "max_tokens": 4, "stream": true}\n'
)


@fault("Each is accepted or refused with a reason; no exception is raised, and what was learned stays finite.")
def fuzz(place: Place) -> str:
    """Messages with extreme fields and damaged bytes go straight into the controller's service and the worker's checks: a
    million of them in a full run."""
    targets, number = Targets(), 0
    wanted = WANTED if place.seconds >= FULL_S else 0
    while number < wanted or place.left_s > 0:
        number += 1
        message = mutant(place.dice.choice(SEEDS), place.dice)
        if message is not None:
            try:
                targets.give(message, place.dice)
            except Exception as error:
                by = f"{type(message).__name__} {message!s:.300}"
                raise AssertionError(f"{type(error).__name__}: {error} by {by}") from error
    targets.check()
    damaged_ones = number - targets.num_taken - targets.num_refused
    return f"{number:,} messages: {targets.num_taken:,} taken, {targets.num_refused:,} refused, {damaged_ones:,} unreadable"


@fault("Controller and worker answer each with a status and stay SERVING; the client gets every token.")
def fuzz_sockets(place: Place) -> str:
    """Damaged and extreme messages are sent to a real controller and a real worker over gRPC and HTTP, while a client sends
    requests."""
    front, counts = free_address(), Counter[str]()
    failures: list[BaseException] = []
    with Fleet(place, worker=["--http-listen", front]) as fleet:
        worker, controller = fleet.workers[0], fleet.controller
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
    strange = set(counts) - CODES - {"HTTP"}
    assert not strange, f"calls ended with {strange}"
    return f"{sum(counts.values()):,} messages: {dict(counts.most_common())}; {load.summary()}"


def fuzz_addresses(
    dice: random.Random, place: Place, controller: str, worker: str, front: str, counts: Counter[str]
) -> None:
    with grpc.insecure_channel(controller) as to_controller, grpc.insecure_channel(worker) as to_worker:
        for _ in place.rounds(20):
            if dice.random() < 0.2:
                send_http(front, damaged(HTTP, dice))
                counts["HTTP"] += 1
                continue
            method, valid = dice.choice(list(METHODS.items()))
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
        return error.code().name
    return "OK"


def send_http(front: str, data: bytes) -> None:
    """Send it, read the answer, and close."""
    host, _, port = front.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(3)
            while connection.recv(65536):
                pass
        except OSError:
            return
