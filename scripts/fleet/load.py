"""Clients of the fleet's address, over gRPC and HTTP: each streams one request after the other and records the result."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import grpc
import httpx
import openai
from nodes import Up

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
Client = Callable[[Up], AbstractContextManager[Callable[[str], Iterator[int]]]]


@dataclass(slots=True)
class Request:
    """One request as its client saw it. Times by time.monotonic; ended 0: it runs.

    status: OK, or the code that ended it: gRPC's, "HTTP 503" and the like, or BROKEN_OFF for a body that ended early.
    """

    over: str
    began: float
    ended: float = 0.0
    status: str = "OK"
    words: str = ""
    num_tokens: int = 0

    def follow(self, pieces: Iterator[int]) -> None:
        """Read the answer to its end. pieces: tokens in each part of it."""
        try:
            for num_tokens in pieces:
                self.num_tokens += num_tokens
        except grpc.RpcError as error:
            self.status, self.words = error.code().name, error.details() or ""
        except openai.APIStatusError as error:
            self.status, self.words = f"HTTP {error.status_code}", str(error)
        except (openai.APIError, httpx.HTTPError) as error:
            self.status, self.words = "BROKEN_OFF", f"{type(error).__name__}: {error}"
        self.ended = time.monotonic()


@contextmanager
def over_grpc(up: Up) -> Iterator[Callable[[str], Iterator[int]]]:
    """A client with one channel: a function from a prompt to the tokens in each part of its answer."""
    with up.client.channel(up.address) as channel:
        stub = rpc.GenerationServiceStub(channel)

        def ask(prompt: str) -> Iterator[int]:
            sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
            for answer in stub.Generate(
                pb.GenerateRequest(text=prompt, sampling_params=sampling, stream=True), timeout=120
            ):
                yield len(answer.chunk.token_ids)

        yield ask


@contextmanager
def over_http(up: Up) -> Iterator[Callable[[str], Iterator[int]]]:
    with openai.OpenAI(base_url=f"http://{up.http}/v1", api_key=up.token, max_retries=1, timeout=120.0) as client:

        def ask(prompt: str) -> Iterator[int]:
            settings = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
            reason = None
            for event in client.completions.create(model="bundled:target", prompt=prompt, stream=True, **settings):
                yield int(bool(event.choices and event.choices[0].text))
                reason = event.choices[0].finish_reason if event.choices else reason
            if reason is None:
                raise httpx.RemoteProtocolError("the stream ended without a finish_reason")

        yield ask


class Clients:
    """Clients over gRPC and over HTTP that run until `stop`."""

    def __init__(self, up: Up, count: int, http_count: int = 0) -> None:
        self.requests: list[Request] = []
        self._up, self._ending = up, threading.Event()
        ways: list[tuple[str, Client]] = [("gRPC", over_grpc)] * count + [("HTTP", over_http)] * http_count
        self._threads = [
            threading.Thread(target=self._run, args=(*way, at), daemon=True) for at, way in enumerate(ways)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60.0)

    def between(self, first: float, last: float) -> list[Request]:
        """Requests that ran at any time between the two moments."""
        return [each for each in self.requests if each.began < last and (each.ended or last) > first]

    def _run(self, over: str, client: Client, number: int) -> None:
        with client(self._up) as ask:
            while not self._ending.is_set():
                request = Request(over, time.monotonic())
                self.requests.append(request)
                request.follow(ask(PROMPTS[number % len(PROMPTS)]))
                number += 1
                if request.status != "OK":
                    time.sleep(0.2)


def statuses(requests: list[Request]) -> str:
    counts = Counter(each.status for each in requests)
    return ", ".join(f"{count} {status}" for status, count in counts.most_common()) or "none"
