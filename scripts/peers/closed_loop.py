"""Closed loops of chat requests over HTTP."""

from __future__ import annotations

import statistics
import threading
import time
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


class ClosedLoop:
    """So many clients, each of which sends its next request when the last one is answered.

    Counted are `seconds` from the moment when every client has had an answer; the load is full for all of that time.
    """

    def __init__(self, server: Server, prompts: ChatPrompts, at_once: int, first_seed: int, seconds: float) -> None:
        self._server, self._prompts, self._seconds, self._at_once = server, prompts, seconds, at_once
        self._seed, self._lock = first_seed, threading.Lock()
        self._answers: list[Answer] = []
        self._errors: list[BaseException] = []
        self._cold = at_once
        self._start: float | None = None

    def run(self) -> dict[str, float]:
        """Tokens per second and mean latency. Raises what a request raised first."""
        clients = [threading.Thread(target=self._client) for _ in range(self._at_once)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if self._errors:
            raise self._errors[0]
        assert self._start is not None
        end = self._start + self._seconds
        tokens = sum(answer.tokens_within(self._start, end) for answer in self._answers)
        latencies = [answer.end - answer.begin for answer in self._answers if self._start < answer.end]
        return {"tokens_per_s": tokens / self._seconds, "latency_mean_s": statistics.fmean(latencies)}

    def _client(self) -> None:
        try:
            self._one()
            with self._lock:
                self._cold -= 1
                if not self._cold:
                    self._start = time.monotonic()
            while not self._errors and (self._start is None or time.monotonic() < self._start + self._seconds):
                self._one()
        except BaseException as error:
            self._errors.append(error)

    def _one(self) -> None:
        with self._lock:
            self._seed += 1
            number = seed = self._seed
            kind, _ = CHAT.kinds[number % len(CHAT.kinds)]
            messages = self._prompts.messages(kind, seed)
        temperature = CHAT.temperatures[number // len(CHAT.kinds) % len(CHAT.temperatures)]
        assert CHAT.most_tokens is not None
        begin = time.monotonic()
        num_tokens = self._server.ask(messages, CHAT.most_tokens, temperature, seed)
        self._answers.append(Answer(begin, time.monotonic(), num_tokens))
