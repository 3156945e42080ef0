"""The load that every peer gets: so many requests at a time, each answered in full before its client sends the next.

Standard library only, since it runs in the environments of the peers. A request is a list of prompt token ids and a
number of tokens to generate; all of them ask for the same number, so that static batches waste nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

Prompt = list[int]
Counted = tuple[int, float, list[float]]  # tokens, elapsed seconds, and latencies of the requests that they belong to


@dataclass(frozen=True)
class Requests:
    """Prompts, to be used in turn, and the number of tokens to generate for each."""

    prompts: list[Prompt]
    num_tokens: int

    @classmethod
    def read(cls, path: Path) -> Requests:
        content = json.loads(path.read_text("utf-8"))
        return cls(content["prompts"], content["num_tokens"])


@dataclass(frozen=True)
class Measured:
    """One mode at one concurrency. latencies_s: of requests that began after the warm-up, in order of their end."""

    peer: str
    mode: str
    concurrency: int
    threads: int
    num_requests: int
    tokens_per_s: float
    latency_mean_s: float
    latency_p95_s: float

    def print(self) -> None:
        print(json.dumps(asdict(self)), flush=True)


def option_parser(description: str, folder: str) -> argparse.ArgumentParser:
    """With the options that every peer's program takes. folder: what the folder of weights and requests holds."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"holds {folder}")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    return parser


def summary(
    peer: str, mode: str, concurrency: int, threads: int, tokens: int, elapsed_s: float, latencies_s: list[float]
) -> Measured:
    ordered = sorted(latencies_s)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    rate, mean = tokens / elapsed_s, statistics.fmean(ordered)
    return Measured(peer, mode, concurrency, threads, len(ordered), rate, mean, p95)


class Clients:
    """`concurrency` clients, each in a thread, that take prompts in turn until the time is up.

    send(prompt, num_tokens) returns the number of tokens that came, which must be num_tokens.
    """

    def __init__(self, send: Callable[[Prompt, int], int], requests: Requests, concurrency: int) -> None:
        self._send = send
        self._requests = requests
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._turn = 0
        self._cold = concurrency  # clients whose first answer has not come
        self._start: float | None = None  # when the last of these came
        self._errors: list[BaseException] = []

    def next_prompt(self) -> Prompt:
        with self._lock:
            self._turn += 1
            return self._requests.prompts[self._turn % len(self._requests.prompts)]

    def run(self, seconds: float) -> Counted:
        """Raises what `send` raised first."""
        spans: list[tuple[float, float]] = []

        def client() -> None:
            try:
                self._one()
                self._warm()
                while not self._errors and (self._start is None or time.perf_counter() < self._start + seconds):
                    spans.append(self._one())
            except BaseException as error:
                self._errors.append(error)

        threads = [threading.Thread(target=client) for _ in range(self._concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        assert self._start is not None
        return count(spans, self._start, seconds, self._requests.num_tokens)

    def _warm(self) -> None:
        with self._lock:
            self._cold -= 1
            if not self._cold:
                self._start = time.perf_counter()

    def _one(self) -> tuple[float, float]:
        begin = time.perf_counter()
        came = self._send(self.next_prompt(), self._requests.num_tokens)
        if came != self._requests.num_tokens:
            raise RuntimeError(f"{came} tokens came instead of {self._requests.num_tokens}")
        return begin, time.perf_counter()


def count(spans: list[tuple[float, float]], start: float, seconds: float, num_tokens: int) -> Counted:
    """Count tokens from `start` on, up to the last answer of so many seconds; load is full for all of that time.

    spans: beginning and end of requests of so many tokens, some of which began before `start`, as others go on after the
    last one. When none ended in time, all that ended later count.
    """
    later = [span for span in spans if span[1] > start]
    counted = [span for span in later if span[1] <= start + seconds] or later
    elapsed = max(end for _, end in counted) - start
    return len(counted) * num_tokens, elapsed, [end - begin for begin, end in counted]


def batches(requests: Requests, size: int) -> Iterator[list[Prompt]]:
    """Prompts in turn, `size` at a time, without end."""
    turn = 0
    while True:
        yield [requests.prompts[(turn + row) % len(requests.prompts)] for row in range(size)]
        turn += size


class Stepping(Protocol):
    """An engine that is driven step by step, in its own process."""

    def add(self, prompt: Prompt) -> Hashable:
        """Begin a request; returns its name."""

    def step(self) -> list[tuple[Hashable, int]]:
        """Names of the requests that ended in the step, and how many tokens each got."""


def step_loop(engine: Stepping, requests: Requests, concurrency: int, seconds: float) -> Counted:
    """Keeps `concurrency` requests in flight; one that has ended is replaced at once, until the time is up."""
    began: dict[Hashable, float] = {}
    spans: list[tuple[float, float]] = []
    supply, start = batches(requests, 1), None

    def add() -> None:
        began[engine.add(next(supply)[0])] = time.perf_counter()

    for _ in range(concurrency):
        add()
    while began:
        ended = engine.step()
        now = time.perf_counter()
        for name, num_tokens in ended:
            if num_tokens != requests.num_tokens:
                raise RuntimeError(f"{num_tokens} tokens came instead of {requests.num_tokens}")
            spans.append((began.pop(name), now))
            if start is None and len(spans) == concurrency:
                start = now  # The first answers are a warm-up.
            if start is None or now < start + seconds:
                add()
    assert start is not None
    return count(spans, start, seconds, requests.num_tokens)
