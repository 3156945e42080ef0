"""The client of the serving benchmark: sends requests over gRPC and notes when their tokens came.

Open loop: a request is sent when the track says so, whether or not earlier ones have finished, and its latency counts
from that moment, so that a server which falls behind cannot hide it. Closed loop: a fixed number of requests at a time,
to measure what a batch size yields.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
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

    index: int
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


def make_request(
    prompt: Prompt, num_tokens: int, temperature: float = 0.0, sampling_seed: int = 0, ends_itself: bool = False
) -> pb.GenerateRequest:
    """With a seed, so that every policy generates the same tokens; past end tokens, unless the model ends its answer."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(
            temperature=temperature, max_tokens=num_tokens, ignore_eos=not ends_itself, seed=sampling_seed
        ),
        stream=True,
    )


def request_of(arrival: Arrival, prompt: Prompt) -> pb.GenerateRequest:
    """The request of an arrival."""
    return make_request(
        *(prompt, arrival.output_tokens, arrival.temperature, arrival.sampling_seed, arrival.ends_itself)
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
    outcomes = [RequestOutcome(index, arrival.at_s) for index, arrival in enumerate(arrivals)]
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.GenerationServiceStub(channel)
        begin = time.monotonic()

        def clock() -> float:
            return time.monotonic() - begin

        turns = asyncio.Semaphore(at_once) if at_once is not None else contextlib.nullcontext()

        async def one(outcome: RequestOutcome) -> None:
            async with turns:
                if at_once is not None:
                    outcome.at_s = clock()
                await send(outcome)

        async def send(outcome: RequestOutcome) -> None:
            arrival = arrivals[outcome.index]
            num_tokens = 1 if arrival.ends_itself else arrival.output_tokens
            request = request_of(arrival, prompts[outcome.index])
            outcome.sent_s = clock()
            await follow(stub.Generate(request, timeout=timeout_s), outcome, clock, num_tokens)

        async with asyncio.TaskGroup() as group:
            for outcome in outcomes:
                await asyncio.sleep(max(0.0, outcome.at_s - clock()))
                group.create_task(one(outcome))
    return outcomes


@dataclass(frozen=True, slots=True)
class Yield:
    """Tokens that a closed loop brought in so many seconds."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class ClosedLoop:
    """Requests that keep a worker busy, and the tokens that came since counting began.

    num_settling: requests that end before counting begins, since in the beginning all prompts are prefilled at once.
    """

    requests: Iterator[pb.GenerateRequest]
    limit_s: float
    num_settling: int
    tokens: int = 0
    num_ended: int = 0
    begun_at: float | None = None
    ended_at: float | None = None

    async def client(self, stub: Any) -> None:
        """Send one request after the other until there are no more or the time is over."""
        while self.ended_at is None and (request := next(self.requests, None)) is not None:
            call = stub.Generate(request, timeout=REQUEST_TIMEOUT_S)
            async for response in call:
                if self.ended_at is not None:
                    call.cancel()
                    return
                self._count(len(response.chunk.token_ids))
            self.num_ended += 1
            if self.num_ended == self.num_settling:
                self._begin()
        self.ended_at = self.ended_at or time.monotonic()

    def _begin(self) -> None:
        self.tokens, self.begun_at = 0, time.monotonic()

    def _count(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        if self.begun_at is not None and time.monotonic() - self.begun_at >= self.limit_s:
            self.ended_at = time.monotonic()


async def closed_loop(
    address: str,
    concurrency: int,
    requests: Iterable[pb.GenerateRequest],
    limit_s: float = math.inf,
    num_settling: int = 0,
) -> Yield:
    """Keep `concurrency` of the requests running, in their order; count tokens for limit_s, or until there are no more.

    Requests that still run then are cut off: fewer are another load. Raises grpc.RpcError when a request fails; ValueError
    when there are no more than num_settling.
    """
    loop = ClosedLoop(iter(requests), limit_s, num_settling, begun_at=None if num_settling else time.monotonic())
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.GenerationServiceStub(channel)
        await asyncio.gather(*(loop.client(stub) for _ in range(concurrency)))
    if loop.begun_at is None or loop.ended_at is None:
        raise ValueError(
            f"{loop.num_ended} requests are too few, as {num_settling} are not counted: measure for longer"
        )
    return Yield(loop.tokens, loop.ended_at - loop.begun_at)


def explain(error: grpc.RpcError, address: str) -> str:
    """One sentence about a failed call."""
    if isinstance(error, aio.AioRpcError):
        return f"the worker at {address} answered {error.code().name}: {error.details()}"
    return f"the worker at {address} failed: {error}"
