"""Closed loops of chat requests over HTTP."""

from __future__ import annotations

import statistics
import threading
import time
from typing import NamedTuple

from program import Server

from speclen.bench.serving.chat import ChatPrompts
from speclen.bench.serving.recipes import CHAT

SET = 3 * len(CHAT.kinds)  # requests: each kind as often


class Answer(NamedTuple):
    num_tokens: int
    latency_s: float


class ClosedLoop:
    """So many clients, each of which sends its next request when the last one is answered.

    Each client's first request is not counted. The next `num_requests` are: the same ones for every program, since answers
    of one kind take three times as long as those of another. The load stays full until all of them are answered.
    All are greedy: sampled, OpenVINO GenAI with a draft gives other texts than its target alone (docs/results/README.md).
    """

    def __init__(
        self, server: Server, prompts: ChatPrompts, at_once: int, first_seed: int, num_requests: int = SET
    ) -> None:
        self._server, self._prompts, self._at_once = server, prompts, at_once
        self._first_seed, self._num_requests = first_seed, num_requests
        self._num_sent, self._lock = 0, threading.Lock()
        self._answers: list[Answer] = []
        self._errors: list[BaseException] = []

    def run(self) -> dict[str, float]:
        """Tokens per second and mean latency. Raises what a request raised first."""
        clients = [threading.Thread(target=self._client) for _ in range(self._at_once)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if self._errors:
            raise self._errors[0]
        latency_s = statistics.fmean(answer.latency_s for answer in self._answers)
        tokens = statistics.fmean(answer.num_tokens for answer in self._answers)
        # By Little's law, since so many requests were under way all the time.
        return {"tokens_per_s": self._at_once * tokens / latency_s, "latency_mean_s": latency_s}

    def _client(self) -> None:
        try:
            while not self._errors and len(self._answers) < self._num_requests:
                with self._lock:
                    number, self._num_sent = self._num_sent, self._num_sent + 1
                answer = self._ask(number)
                if self._at_once <= number < self._at_once + self._num_requests:
                    self._answers.append(answer)
        except BaseException as error:
            self._errors.append(error)

    def _ask(self, number: int) -> Answer:
        kind, _ = CHAT.kinds[number % len(CHAT.kinds)]
        with self._lock:  # the prompts share a tokenizer
            messages = self._prompts.messages(kind, self._first_seed + number)
        assert CHAT.most_tokens is not None
        begin = time.monotonic()
        num_tokens = self._server.ask(messages, CHAT.most_tokens)
        return Answer(num_tokens, time.monotonic() - begin)
