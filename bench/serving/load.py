"""The client of the serving benchmark: sends requests over gRPC and notes when their tokens came.

A request is sent when the track says so, whether or not earlier ones have finished, and its latency counts from that
moment, so that a server which falls behind cannot hide it. In a closed loop it is sent when another ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from speclen.bench.serving.tracks import Arrival
from speclen.transport.aio import prepare_aio
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 16 * 1024 * 1024), ("grpc.enable_http_proxy", 0)]
REQUEST_TIMEOUT_S = 120.0
Prompt = Sequence[int]


@dataclass(slots=True)
class RequestOutcome:
    """Times, counts and output of one request. Times in seconds since the track began; None: it did not happen.

    error: empty for a request that got all the tokens it asked for.
    """

    at_s: float
    sent_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str = ""
    output_ids: tuple[int, ...] = ()

    @property
    def latency_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.at_s


def request_of(arrival: Arrival, prompt: Prompt) -> pb.GenerateRequest:
    """With a seed, so that every policy generates the same tokens; past end tokens, unless the model ends its answer."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(
            temperature=arrival.temperature,
            max_tokens=arrival.output_tokens,
            ignore_eos=not arrival.ends_itself,
            seed=arrival.sampling_seed,
        ),
        stream=True,
    )


async def follow(call: Any, outcome: RequestOutcome, clock: Callable[[], float], num_tokens: int) -> None:
    """Read one answer to its end and fill in the outcome; errors end up in it, too."""
    try:
        async for response in call:
            if outcome.first_token_s is None:
                outcome.first_token_s = clock()
            if response.HasField("chunk"):
                outcome.num_tokens += len(response.chunk.token_ids)
            else:
                note_completion(response.complete, outcome, clock(), num_tokens)
    except aio.AioRpcError as error:
        outcome.error = f"{error.code().name}: {error.details()}"
        return
    if outcome.finished_s is None and not outcome.error:
        outcome.error = "the stream ended without a completion"


def note_completion(complete: pb.GenerateComplete, outcome: RequestOutcome, now: float, num_tokens: int) -> None:
    outcome.num_tokens = len(complete.output_ids)
    outcome.output_ids = tuple(complete.output_ids)
    stats = complete.speculation
    outcome.num_draft_tokens = stats.num_draft_tokens
    outcome.num_accepted_tokens = stats.num_accepted_tokens
    if outcome.num_tokens < num_tokens:
        outcome.error = f"{outcome.num_tokens} tokens instead of {num_tokens}"
    else:
        outcome.finished_s = now


async def open_loop(
    address: str,
    arrivals: Sequence[Arrival],
    prompts: Sequence[Prompt],
    timeout_s: float = REQUEST_TIMEOUT_S,
    at_once: int | None = None,
) -> list[RequestOutcome]:
    """Send every request at its time and wait for all answers; one outcome per arrival, in order.

    at_once: at most so many at a time; the others' time comes when one before them has ended.
    """
    prepare_aio()
    outcomes = [RequestOutcome(arrival.at_s) for arrival in arrivals]
    turns = asyncio.Semaphore(at_once or max(1, len(arrivals)))
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.GenerationServiceStub(channel)
        begin = time.monotonic()

        def clock() -> float:
            return time.monotonic() - begin

        async def send(outcome: RequestOutcome, arrival: Arrival, prompt: Prompt) -> None:
            request, num_tokens = request_of(arrival, prompt), 1 if arrival.ends_itself else arrival.output_tokens
            async with turns:
                outcome.sent_s = clock()
                if at_once is not None:
                    outcome.at_s = outcome.sent_s
                await follow(stub.Generate(request, timeout=timeout_s), outcome, clock, num_tokens)

        async with asyncio.TaskGroup() as group:
            for outcome, arrival, prompt in zip(outcomes, arrivals, prompts, strict=True):
                await asyncio.sleep(max(0.0, arrival.at_s - clock()))
                group.create_task(send(outcome, arrival, prompt))
    return outcomes
