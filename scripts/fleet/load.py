"""Clients of the one address, over gRPC and over HTTP: each streams one request after the other, and notes what it saw."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import httpx
import openai

from speclen.cli.support.client import Client
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n",
    "import os\n\ndef walk(",
    "try:\n    value = int(",
    "for key, value in ",
)
NUM_TOKENS = 96
MODEL = "bundled:target"


@dataclass(slots=True)
class Request:
    """One request as its client saw it. Times by time.monotonic. status: OK, or the code that ended it.

    over: "gRPC" or "HTTP", whose statuses are "HTTP 503" and the like, or BROKEN_OFF for a body that ended early.
    """

    began: float
    over: str = "gRPC"
    ended: float = 0.0
    status: str = "OK"
    words: str = ""
    num_tokens: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # when, and seconds per token since the chunk before

    @property
    def had_begun_to_stream(self) -> bool:
        return self.num_tokens > 0


class Clients:
    """So many clients over gRPC, and over HTTP, from `start` to `stop`."""

    def __init__(
        self, client: Client, address: str, count: int, http: str = "", key: str = "", http_count: int = 0
    ) -> None:
        self._client, self._address, self._http, self._key = client, address, http, key
        self._ending = threading.Event()
        self.requests: list[Request] = []
        ways = [self._run] * count + [self._run_http] * http_count
        self._threads = [threading.Thread(target=way, args=(at,), daemon=True) for at, way in enumerate(ways)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60.0)

    def between(self, first: float, last: float) -> list[Request]:
        """Requests that ran at any time between the two moments."""
        return [each for each in self.requests if each.began < last and (each.ended or last) > first]

    def _run(self, number: int) -> None:
        with self._client.channel(self._address) as channel:
            stub = rpc.GenerationServiceStub(channel)
            while not self._ending.is_set():
                request = Request(time.monotonic())
                self.requests.append(request)
                self._one(stub, request, PROMPTS[number % len(PROMPTS)])
                number += 1
                if request.status != "OK":
                    time.sleep(0.2)

    def _run_http(self, number: int) -> None:
        client = openai.OpenAI(base_url=f"http://{self._http}/v1", api_key=self._key, max_retries=1, timeout=120.0)
        while not self._ending.is_set():
            request = Request(time.monotonic(), over="HTTP")
            self.requests.append(request)
            self._one_http(client, request, PROMPTS[number % len(PROMPTS)])
            number += 1
            if request.status != "OK":
                time.sleep(0.2)

    def _one_http(self, client: openai.OpenAI, request: Request, prompt: str) -> None:
        settings = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
        reason = None
        try:
            for event in client.completions.create(model=MODEL, prompt=prompt, stream=True, **settings):
                request.num_tokens += bool(event.choices and event.choices[0].text)
                reason = event.choices[0].finish_reason if event.choices else reason
            if reason is None:
                request.status, request.words = "BROKEN_OFF", "the stream ended without a finish_reason"
        except openai.APIStatusError as error:
            request.status, request.words = f"HTTP {error.status_code}", first_line(str(error))
        except (openai.APIError, httpx.HTTPError) as error:
            request.status, request.words = "BROKEN_OFF", first_line(f"{type(error).__name__}: {error}")
        request.ended = time.monotonic()

    def _one(self, stub: rpc.GenerationServiceStub, request: Request, prompt: str) -> None:
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        message = pb.GenerateRequest(text=prompt, sampling_params=sampling, stream=True)
        last = 0.0
        try:
            for answer in stub.Generate(message, timeout=120):
                now, tokens = time.monotonic(), len(answer.chunk.token_ids)
                if last and tokens:
                    request.gaps.append((now, (now - last) / tokens))
                if tokens:
                    last, request.num_tokens = now, request.num_tokens + tokens
        except grpc.RpcError as error:
            request.status, request.words = error.code().name, first_line(error.details())
        request.ended = time.monotonic()


def first_line(text: str | None) -> str:
    return next(iter((text or "").strip().splitlines()), "")


def statuses(requests: list[Request]) -> str:
    counts = Counter(each.status for each in requests)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none"


def gap_ms(requests: list[Request], first: float, last: float, share: float = 0.99) -> float:
    """A quantile of milliseconds per token of the chunks that came between two moments."""
    gaps = sorted(gap for each in requests for at, gap in each.gaps if first <= at < last)
    return 1000 * gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else float("nan")
