"""Closed loops of chat requests over HTTP."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from program import Server

from speclen.bench.serving.prompts import ChatPrompts
from speclen.bench.serving.traffic import CHAT_KINDS, LONGEST_CHAT_TOKENS

SET = 3 * len(CHAT_KINDS)  # requests: each kind as often


class Answer(NamedTuple):
    num_tokens: int
    latency_s: float


def closed_loop(
    server: Server, prompts: ChatPrompts, at_once: int, first_seed: int, num_requests: int = SET
) -> dict[str, float]:
    """Tokens per second and mean latency of at_once clients, each of which sends a request when one is answered.

    Each client's first request is not counted. The next `num_requests` are: the same ones for every program, since answers
    of one kind take three times as long as those of another. The load stays full until all of them are answered. All
    are greedy: sampled, OpenVINO GenAI with a draft gives other texts than its target alone (docs/results/README.md).
    Raises the error of a failed request.
    """
    numbers, answers, failed = itertools.count(), list[Answer](), threading.Event()

    def ask(number: int) -> Answer:
        kind = CHAT_KINDS[number % len(CHAT_KINDS)]
        messages, begin = prompts.messages(kind, first_seed + number), time.monotonic()
        return Answer(server.ask(messages, LONGEST_CHAT_TOKENS), time.monotonic() - begin)

    def client(_: int) -> None:
        try:
            while not failed.is_set() and len(answers) < num_requests:
                number = next(numbers)
                answer = ask(number)
                if at_once <= number < at_once + num_requests:
                    answers.append(answer)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(client, range(at_once)))
        except BaseException:  # Ctrl-C, too
            failed.set()
            raise
    latency_s = statistics.fmean(answer.latency_s for answer in answers)
    tokens = statistics.fmean(answer.num_tokens for answer in answers)
    # By Little's law, since the concurrency is constant.
    return {"tokens_per_s": at_once * tokens / latency_s, "latency_mean_s": latency_s}
