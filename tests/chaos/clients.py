"""Clients that vanish, read slowly or never, send too much, or are too many."""

from __future__ import annotations

import json
import random
import socket
import statistics
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc

from chaos.fault import Place, fault, require, until
from chaos.fleet import SERVING, Fleet, Program, free_address, is_idle, sleep
from chaos.load import MOST_TOKENS, PROMPTS, Load, complaint, request, truth
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc


@fault("Their rows are free after the running step; nobody else's answer changes.")
def disconnects(place: Place) -> str:
    """Clients cancel, close their connection or let a deadline pass, after no, one or some messages."""
    ends: Counter[str] = Counter()
    with Fleet(place) as fleet:
        worker = fleet.workers[0]

        def leave(seed: int) -> str:
            dice = random.Random(seed)
            how = dice.choice(("cancelled", "closed the connection", "let the deadline pass"))
            with grpc.insecure_channel(worker.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
                deadline = dice.uniform(0.001, 0.3) if how.startswith("let") else 30.0
                message = request(dice.randrange(len(PROMPTS)), 1500, logprobs=dice.choice((0, 5)))
                call = rpc.GenerationServiceStub(channel).Generate(message, timeout=deadline)
                try:
                    for _ in range(dice.choice((0, 1, 5))):
                        next(call)
                    if how.startswith("let"):
                        list(call)
                except (grpc.RpcError, StopIteration):
                    return how
                if how == "cancelled":
                    call.cancel()
            return how

        with Load([worker.address], 3, place.dice.randrange(2**20)) as load, ThreadPoolExecutor(6) as pool:
            for _ in place.rounds(2):
                ends.update(pool.map(leave, [place.dice.randrange(2**30) for _ in range(20)]))
        free_s = until(lambda: is_idle(worker.info()), "that all rows are free", 10.0)
    listed = ", ".join(f"{count} {how}" for how, count in ends.most_common())
    return f"{listed}; all rows free {free_s:.1f} s later; {load.summary()}"


@fault(
    "Others are served meanwhile, since callers take turns. Who takes nothing costs no more than who reads, and is ended "
    "--unread-timeout-s after what lies between them is full (64 kB or more, which gRPC and the kernel decide).",
)
def never_reading(place: Place) -> str:
    """Twenty HTTP connections and four gRPC streams ask for long outputs with log probabilities and never read."""
    front, metrics = free_address(), free_address()
    flags = ["--http-listen", front, "--metrics-listen", metrics, "--unread-timeout-s", "2"]
    with Fleet(place, worker=flags) as fleet:
        worker, page = fleet.workers[0], f"http://{metrics}/metrics"
        ended_s = []
        with Load([worker.address], 2, place.dice.randrange(2**20)) as load:
            for _ in place.rounds(1):
                with grpc.insecure_channel(worker.address, options=[("grpc.http2.lookahead_bytes", 1024)]) as channel:
                    stub = rpc.GenerationServiceStub(channel)
                    unread = [stub.Generate(request(0, 900, logprobs=20), timeout=300) for _ in range(4)]
                    connections = [never_read(front) for _ in range(20)]
                    until(lambda: num_busy(worker) > 10, "that unread requests are in")
                    before = load.num_answered
                    ended_s.append(until(lambda: num_busy(worker) <= 2, "the end of unread requests", 240.0))
                    require(load.num_answered > before, "nobody else got an answer beside clients that never read")
                    for each in connections:
                        each.close()
                    for call in unread:
                        call.cancel()
        fleet.check_idle()
        num_slow = count(page, "speclen_slow_readers_total")
    return f"all over after {max(ended_s):.0f} s, {num_slow:.0f} ended as slow readers; others: {load.summary()}"


def count(page: str, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(page) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def num_busy(worker: Program) -> int:
    info = worker.info()
    return info.num_requests_running + info.num_requests_waiting


def never_read(front: str) -> socket.socket:
    """A connection from an address of its own, so that it is another caller than the load."""
    host, _, port = front.rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.bind(("127.0.0.9", 0))
    connection.connect((host, int(port)))
    fields = {"model": "bundled:target", "prompt": PROMPTS[0], "max_tokens": 300, "stream": True, "logprobs": 5}
    body = json.dumps({**fields, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@fault("They get every token, as late as they read; others are not held up.")
def slow_reading(place: Place) -> str:
    """gRPC clients take one message every fifth of a second."""
    with Fleet(place) as fleet:
        worker = fleet.workers[0]

        def read_slowly(number: int) -> str:
            prompt = number % len(PROMPTS)
            with grpc.insecure_channel(worker.address) as channel:
                responses = []
                for response in rpc.GenerationServiceStub(channel).Generate(request(prompt, MOST_TOKENS), timeout=120):
                    responses.append(response)
                    sleep(0.2)
            return complaint(prompt, MOST_TOKENS, responses)

        num_read = 0
        with Load([worker.address], 2, place.dice.randrange(2**20)) as load, ThreadPoolExecutor(12) as pool:
            for _ in place.rounds(1):
                wrong = [each for each in pool.map(read_slowly, range(12)) if each]
                require(not wrong, f"a slow reader got {wrong[:1]}")
                num_read += 12
        fleet.check_idle()
    return f"{num_read} slow readers got every token; others: {load.summary()}"


@fault(
    "Health and everybody's streams go on, a text over the context's length is refused by name, and memory grows by less "
    "than 1 GB."
)
def huge_texts(place: Place) -> str:
    """Texts of 3.9 MB are sent six at a time."""
    with Fleet(place) as fleet:
        worker = fleet.workers[0]
        before_mb, longest_s, codes = worker.resident_mb(), 0.0, Counter[str]()
        text = "".join(place.dice.choice("abc def(x):\n") for _ in range(39)) * 100_000

        def send(_: int) -> str:
            with grpc.insecure_channel(worker.address) as channel:
                try:
                    list(rpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text=text), timeout=120))
                except grpc.RpcError as error:
                    return f"{error.code().name}"
            return "OK"

        with Load([worker.address], 2, place.dice.randrange(2**20)) as load, ThreadPoolExecutor(6) as pool:
            for _ in place.rounds(1):
                sent = [pool.submit(send, number) for number in range(6)]
                while not all(each.done() for each in sent):
                    started = time.monotonic()
                    require(worker.health(timeout_s=10.0) == SERVING, "the worker is not SERVING beside huge texts")
                    longest_s = max(longest_s, time.monotonic() - started)
                    sleep(0.1)
                codes.update(each.result() for each in sent)
        grown_mb = worker.resident_mb() - before_mb
    require(set(codes) <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, f"huge texts ended with {dict(codes)}")
    require(grown_mb < 1000, f"memory grew by {grown_mb:.0f} MB")
    require(longest_s < 3.0, f"health took {longest_s:.1f} s beside huge texts")
    return f"{dict(codes)}; health took {longest_s:.2f} s at most; memory +{grown_mb:.0f} MB; {load.summary()}"


class Crowd:
    """Clients that ask for equally long outputs, all the time. waits_s: of answered requests.

    pause_s: after which one that was refused comes back, on average.
    """

    def __init__(self, address: str, num_clients: int, seconds: float, pause_s: float = 1.0) -> None:
        self.waits_s: list[float] = []
        self.codes: Counter[str] = Counter()
        self.wrong = 0
        self._address, self._pause_s, self._ends_at = address, pause_s, time.monotonic() + seconds
        threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 90)

    def _ask(self, number: int) -> None:
        dice = random.Random(number)
        with grpc.insecure_channel(self._address) as channel:
            while time.monotonic() < self._ends_at:
                prompt, started = dice.randrange(len(PROMPTS)), time.monotonic()
                try:
                    responses = list(
                        rpc.GenerationServiceStub(channel).Generate(request(prompt, MOST_TOKENS), timeout=90)
                    )
                except grpc.RpcError as error:
                    self.codes[error.code().name] += 1
                    sleep(self._pause_s * dice.uniform(0.5, 1.5))
                    continue
                self.waits_s.append(time.monotonic() - started)
                self.codes["OK"] += 1
                self.wrong += bool(complaint(prompt, MOST_TOKENS, responses))

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.waits_s, n=100, method="inclusive")[98]


@fault(
    "With --max-queue-s at a quarter of what an answer takes, an accepted request takes at p99 at most twice what it takes "
    "on a worker that is just full; the others are refused at once, with how long they would have waited.",
    weight=2,
)
def overload(place: Place) -> str:
    """Ten times as many requests come as there are rows for: eighty clients at eight rows, who come back after a refusal
    in the time that an answer takes."""
    truth()
    with Fleet(place) as fleet:
        worker = fleet.workers[0]
        Crowd(worker.address, 8, 4.0)
        full = Crowd(worker.address, 8, max(6.0, place.seconds / 4))
        patient = Crowd(worker.address, 80, max(6.0, place.seconds / 4))
        worker.stop()
        usual_s = statistics.median(full.waits_s)
        worker.arguments += ["--max-queue-s", f"{0.25 * usual_s:.2f}"]
        worker.start()
        worker.wait_until_serving()
        Crowd(worker.address, 8, 4.0)
        crowd = Crowd(worker.address, 80, max(6.0, place.seconds / 2), usual_s)
        fleet.check_idle()
    require(not full.wrong + patient.wrong + crowd.wrong, "an answer was not the target's own")
    require(set(crowd.codes) == {"OK", "RESOURCE_EXHAUSTED"}, f"overload ended with {dict(crowd.codes)}")
    ratio = crowd.p99_s / full.p99_s
    require(ratio <= 2.0, f"p99 is {crowd.p99_s:.2f} s under overload, {ratio:.1f} times that of a full worker")
    return (
        f"p99 {full.p99_s:.2f} s when full, {crowd.p99_s:.2f} s under ten times that ({ratio:.2f} times), "
        f"{patient.p99_s:.2f} s without --max-queue-s, where all of them wait; {len(crowd.waits_s)} answered, "
        f"{crowd.codes['RESOURCE_EXHAUSTED']:,} refused"
    )
