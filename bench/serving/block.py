"""Serves one block by one policy, and sums it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from grpc import aio

from speclen.bench.serving.load import REQUEST_TIMEOUT_S, Prompt, RequestOutcome, open_loop
from speclen.bench.serving.tracks import Block
from speclen.transport.aio import prepare_aio
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """One block under one policy. Latencies count from the moment that the track says to the last token; where requests
    wait for each other, from that at which theirs has come.

    latency_sum_s, percentiles: of the requests that got all their tokens; num_failed: the others, errors: why. late_s: the
    99th percentile of how much later than planned requests were sent.
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

    @property
    def mean_latency_s(self) -> float:
        return self.latency_sum_s / max(1, self.num_requests - self.num_failed)


@dataclass(slots=True)
class ServedBlock:
    """outcomes: one per arrival, in order. num_row_steps: steps, over the sequences in each."""

    outcomes: list[RequestOutcome]
    num_steps: int
    num_row_steps: int
    seconds: float


async def serve_block(
    address: str, block: Block, prompts: Sequence[Prompt], timeout_s: float = REQUEST_TIMEOUT_S
) -> ServedBlock:
    """Send every request at its time, and wait for all answers. Raises AioRpcError when the worker is gone."""
    before = await counters(address)
    outcomes = await open_loop(address, block.arrivals, prompts, timeout_s, block.at_once)
    after = await counters(address)
    ends = [outcome.finished_s for outcome in outcomes if outcome.finished_s is not None]
    steps, row_steps = after.num_steps - before.num_steps, after.num_row_steps - before.num_row_steps
    return ServedBlock(outcomes, steps, row_steps, max(ends, default=block.duration_s))


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
    )
