"""The load that every peer gets: so many requests at a time, each answered in full before its client sends the next.

Standard library only, since it runs in the environments of the peers. A request is a list of prompt token ids and a
number of tokens to generate; all of them ask for the same number, so that static batches waste nothing.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

Prompt = list[int]


@dataclass(frozen=True)
class Requests:
    """What is asked: prompts, to be used in turn, and tokens to generate for each."""

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


def summary(
    peer: str, mode: str, concurrency: int, threads: int, tokens: int, elapsed_s: float, latencies_s: list[float]
) -> Measured:
    ordered = sorted(latencies_s)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    rate, mean = tokens / elapsed_s, statistics.fmean(ordered)
    return Measured(peer, mode, concurrency, threads, len(ordered), rate, mean, p95)


class Clients:
    """`concurrency` clients, each in a thread, that take prompts in turn until the time is up.

    send(prompt, num_tokens) returns the number of tokens that came, which must be num_tokens. Throughput counts whole
    requests from the end of the warm-up request of the slowest client to the end of the last one.
    """

    def __init__(self, send: Callable[[Prompt, int], int], requests: Requests, concurrency: int) -> None:
        self._send = send
        self._requests = requests
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._turn = 0
        self._errors: list[BaseException] = []

    def next_prompt(self) -> Prompt:
        with self._lock:
            self._turn += 1
            return self._requests.prompts[self._turn % len(self._requests.prompts)]

    def run(self, seconds: float) -> tuple[int, float, list[float]]:
        """Tokens, elapsed seconds and latencies. Raises what `send` raised first."""
        warm = threading.Barrier(self._concurrency)
        spans: list[tuple[float, float]] = []

        def client() -> None:
            try:
                self._one()
                warm.wait()
                deadline = time.perf_counter() + seconds
                while time.perf_counter() < deadline:
                    spans.append(self._one())
            except threading.BrokenBarrierError:
                return
            except BaseException as error:
                self._errors.append(error)
                warm.abort()

        threads = [threading.Thread(target=client) for _ in range(self._concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        elapsed = max(end for _, end in spans) - min(begin for begin, _ in spans)
        return len(spans) * self._requests.num_tokens, elapsed, [end - begin for begin, end in spans]

    def _one(self) -> tuple[float, float]:
        begin = time.perf_counter()
        came = self._send(self.next_prompt(), self._requests.num_tokens)
        if came != self._requests.num_tokens:
            raise RuntimeError(f"{came} tokens came instead of {self._requests.num_tokens}")
        return begin, time.perf_counter()


def batches(requests: Requests, size: int) -> Iterator[list[Prompt]]:
    """Prompts in turn, `size` at a time, without end."""
    turn = 0
    while True:
        yield [requests.prompts[(turn + row) % len(requests.prompts)] for row in range(size)]
        turn += size
