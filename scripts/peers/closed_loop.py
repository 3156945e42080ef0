"""Closed loops of chat requests over HTTP."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from program import Server

from speclen.bench.serving.chat import ChatPrompts
from speclen.bench.serving.recipes import CHAT


@dataclass(frozen=True)
class Answer:
    begin: float
    end: float
    num_tokens: int

    def tokens_within(self, low: float, high: float) -> float:
        """Tokens of the answer that came between the two moments, as if they had come evenly."""
        overlap = max(0.0, min(self.end, high) - max(self.begin, low))
        return self.num_tokens * overlap / (self.end - self.begin)


def closed_loop(
    server: Server, prompts: ChatPrompts, at_once: int, first_seed: int, seconds: float
) -> dict[str, float]:
    """Tokens per second and mean latency of so many clients, each of which asks again when it is answered.

    Counted are `seconds` from the moment when every client has had an answer; the load is full for all of that time.
    Raises what a request raised.
    """
    seeds, answers, warm, failed = itertools.count(first_seed + 1), list[Answer](), list[float](), threading.Event()

    def ask() -> None:
        seed, begin = next(seeds), time.monotonic()
        kind, _ = CHAT.kinds[seed % len(CHAT.kinds)]
        temperature = CHAT.temperatures[seed // len(CHAT.kinds) % len(CHAT.temperatures)]
        num_tokens = server.ask(prompts.messages(kind, seed), CHAT.most_tokens or 0, temperature, seed)
        answers.append(Answer(begin, time.monotonic(), num_tokens))

    def client(_: int) -> None:
        try:
            ask()
            warm.append(time.monotonic())
            while not failed.is_set() and (len(warm) < at_once or time.monotonic() < max(warm) + seconds):
                ask()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(client, range(at_once)))
    start = max(warm)
    tokens = sum(answer.tokens_within(start, start + seconds) for answer in answers)
    latencies = [answer.end - answer.begin for answer in answers if start < answer.end]
    return {"tokens_per_s": tokens / seconds, "latency_mean_s": statistics.fmean(latencies)}
