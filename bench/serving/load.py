"""The client of the serving benchmark: sends requests over gRPC and notes when their tokens came.

In an open loop a request is sent at its planned time, whether or not earlier ones have finished, and its latency counts
from that time, so that a server which falls behind cannot hide it. In a closed loop it is sent when another ends.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from grpc import aio

from speclen.bench.serving.traffic import Arrival, Block, Conversations, draw_requests, recipe_of
from speclen.process.servers import prepare_aio
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 16 * 1024 * 1024), ("grpc.enable_http_proxy", 0)]
REQUEST_TIMEOUT_S = 120.0
Prompt = Sequence[int]


@dataclass(slots=True)
class RequestOutcome:
    """Times, counts and output of one request. Times in seconds since the block began; None: it did not happen.

    error: empty for a request that got all the tokens it asked for. first_token_s, chunks: of a streamed answer, the time of
    the first token, and all times at which tokens came, with their numbers.
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
    chunks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def latency_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.at_s


def request_of(arrival: Arrival, prompt: Prompt) -> pb.GenerateRequest:
    """The request with a seed, so that every policy generates the same tokens; end tokens are ignored unless ends_itself."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(
            temperature=arrival.temperature,
            max_tokens=arrival.output_tokens,
            ignore_eos=not arrival.ends_itself,
            seed=arrival.sampling_seed,
        ),
        stream=arrival.streamed,
    )


async def follow(call: Any, outcome: RequestOutcome, clock: Callable[[], float], num_tokens: int) -> None:
    """Read one answer to its end and fill in the outcome, or its error."""
    try:
        async for response in call:
            if response.HasField("chunk"):
                if outcome.first_token_s is None:
                    outcome.first_token_s = clock()
                outcome.num_tokens += len(response.chunk.token_ids)
                outcome.chunks.append((clock(), len(response.chunk.token_ids)))
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


async def send_all(
    address: str, arrivals: Sequence[Arrival], prompts: Sequence[Prompt], timeout_s: float = REQUEST_TIMEOUT_S
) -> list[RequestOutcome]:
    """Send every request in order and in time, and wait for all answers; one outcome per arrival, in order."""
    prepare_aio()
    outcomes = [RequestOutcome(arrival.at_s) for arrival in arrivals]
    under_way, ended = 0, asyncio.Event()
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = rpc.GenerationServiceStub(channel)
        begin = time.monotonic()

        def clock() -> float:
            return time.monotonic() - begin

        async def send(outcome: RequestOutcome, arrival: Arrival, prompt: Prompt) -> None:
            nonlocal under_way
            request, num_tokens = request_of(arrival, prompt), 1 if arrival.ends_itself else arrival.output_tokens
            outcome.sent_s = clock()
            if arrival.at_once is not None:
                outcome.at_s = outcome.sent_s
            await follow(stub.Generate(request, timeout=timeout_s), outcome, clock, num_tokens)
            under_way -= 1
            ended.set()

        async with asyncio.TaskGroup() as group:
            for outcome, arrival, prompt in zip(outcomes, arrivals, prompts, strict=True):
                while arrival.at_once is not None and under_way >= arrival.at_once:
                    ended.clear()
                    await ended.wait()
                await asyncio.sleep(max(0.0, arrival.at_s - clock()))
                under_way += 1
                group.create_task(send(outcome, arrival, prompt))
    return outcomes


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """One block under one policy. Latencies count from the planned time to the last token; in a closed loop, from the time
    of sending.

    latency_sum_s, percentiles: of the requests that got all their tokens; num_failed: the others, errors: why. late_s: the
    99th percentile of how much later than planned requests were sent. ttft_mean_s: 0 if no answer was streamed. seconds:
    until the last answer ended. tokens_by_s: tokens that came in each second. by_size: tokens, and seconds of latency, of
    the requests of each concurrency.
    """

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    latency_sum_s: float
    latency_p50_s: float
    latency_p95_s: float
    latency_p99_s: float
    ttft_mean_s: float
    num_tokens: int
    seconds: float
    num_steps: int
    num_row_steps: int
    num_proposed: int
    num_accepted: int
    late_s: float
    tokens_by_s: tuple[int, ...] = ()
    by_size: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_latency_s(self) -> float:
        return self.latency_sum_s / max(1, self.num_requests - self.num_failed)


@dataclass(slots=True)
class ServedBlock:
    """outcomes: one per arrival, in order. num_row_steps: sum of sequences over all steps."""

    arrivals: Sequence[Arrival]
    outcomes: list[RequestOutcome]
    num_steps: int
    num_row_steps: int
    seconds: float


async def serve_block(
    address: str, block: Block, prompts: Sequence[Prompt], timeout_s: float = REQUEST_TIMEOUT_S
) -> ServedBlock:
    """Send every request at its time, and wait for all answers. Raises AioRpcError when the worker is gone."""
    before = await counters(address)
    outcomes = await send_all(address, block.arrivals, prompts, timeout_s)
    after = await counters(address)
    ends = [outcome.finished_s for outcome in outcomes if outcome.finished_s is not None]
    steps, row_steps = after.num_steps - before.num_steps, after.num_row_steps - before.num_row_steps
    return ServedBlock(block.arrivals, outcomes, steps, row_steps, max(ends, default=block.duration_s))


async def counters(address: str) -> pb.GetServerInfoResponse:
    """The worker's counters."""
    prepare_aio()
    async with aio.insecure_channel(address) as channel:
        return await rpc.GenerationServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=5.0)


def figures_of(served: ServedBlock) -> BlockFigures:
    """The figures of a served block."""
    done = [outcome for outcome in served.outcomes if not outcome.error]
    latencies = np.array([outcome.latency_s for outcome in done]) if done else np.zeros(1)
    p50, p95, p99 = (float(value) for value in np.percentile(latencies, [50, 95, 99]))
    return BlockFigures(
        num_requests=len(served.outcomes),
        num_failed=len(served.outcomes) - len(done),
        errors=dict(Counter(outcome.error for outcome in served.outcomes if outcome.error)),
        latency_sum_s=float(latencies.sum()) if done else 0.0,
        latency_p50_s=p50,
        latency_p95_s=p95,
        latency_p99_s=p99,
        ttft_mean_s=float(np.mean([o.first_token_s - o.at_s for o in done if o.first_token_s is not None] or [0.0])),
        num_tokens=sum(outcome.num_tokens for outcome in done),
        seconds=served.seconds,
        num_steps=served.num_steps,
        num_row_steps=served.num_row_steps,
        num_proposed=sum(outcome.num_draft_tokens for outcome in done),
        num_accepted=sum(outcome.num_accepted_tokens for outcome in done),
        late_s=float(np.percentile([o.sent_s - o.at_s for o in served.outcomes], 99)),
        tokens_by_s=tokens_by_second(served.outcomes),
        by_size=sums_by_size(served),
    )


def tokens_by_second(outcomes: Sequence[RequestOutcome]) -> tuple[int, ...]:
    """Tokens that came in each second of the block."""
    seconds = Counter[int]()
    for outcome in outcomes:
        for at_s, number in outcome.chunks:
            seconds[int(at_s)] += number
    return tuple(seconds[second] for second in range(max(seconds, default=-1) + 1))


def sums_by_size(served: ServedBlock) -> dict[int, tuple[int, float]]:
    """Tokens, and seconds of latency, of the answered requests of each concurrency; empty for an open loop."""
    found: dict[int, tuple[int, float]] = {}
    for arrival, outcome in zip(served.arrivals, served.outcomes, strict=True):
        if arrival.at_once is not None and not outcome.error:
            tokens, latency_s = found.get(arrival.at_once, (0, 0.0))
            found[arrival.at_once] = (tokens + outcome.num_tokens, latency_s + outcome.latency_s)
    return found


LENGTHS = range(5)  # the fastest length of a full worker is short
REQUESTS_PER_SLOT = 4
OF_ITS_OWN = 1_000_000  # larger than the number of any round


def busy_block(track: str, slots: int, seed: int, chat: bool) -> Block:
    """Requests of the workload for every slot, all sent at the start."""
    rng, times = np.random.default_rng([seed, OF_ITS_OWN]), np.zeros(REQUESTS_PER_SLOT * slots)
    arrivals = draw_requests(rng, times, recipe_of(track).mix, chat, Conversations(rng))
    return Block(track, OF_ITS_OWN, 0.0, tuple(replace(arrival, at_once=slots) for arrival in arrivals))


def busy_rate(outcomes: Sequence[RequestOutcome]) -> float:
    """Tokens per second until the last request was sent, when every slot was busy.

    Tokens of an answer that ended later count as if they had come evenly. Raises ValueError naming why a request failed.
    """
    if error := next((one.error for one in outcomes if one.error), None):
        raise ValueError(f"measuring the capacity failed: {error}")
    until = max(one.sent_s for one in outcomes)
    return sum(one.num_tokens * min(1.0, (until - one.sent_s) / one.latency_s) for one in outcomes) / until
