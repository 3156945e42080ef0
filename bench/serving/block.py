"""Serves one block by one policy, and says what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import numpy as np

from speclen.bench.serving.deployment import start_burner
from speclen.bench.serving.load import REQUEST_TIMEOUT_S, Progress, Prompt, RequestOutcome, open_loop
from speclen.bench.serving.tracks import Block
from speclen.bench.serving.watch import Sample, reached_steps_at, watch

BIN_S = 1.0  # of the course of a block


@dataclass(frozen=True, slots=True)
class Bin:
    """A second of a block. Latencies are of the requests that arrived in it; the rest is what the worker did in it."""

    num_requests: int
    latency_sum_s: float
    num_steps: int
    num_row_steps: int
    num_proposed: int


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """One block under one policy. Latencies count from the moment that the track says to the last token; where requests
    wait for each other, from that at which theirs has come.

    latency_sum_s, percentiles: of the requests that got all their tokens; num_failed: the others, errors: why.
    settled_at_s: when the worker had done so many steps as the track says, where it says so; settled_*: of the requests
    that arrived later. outputs: fingerprint of all tokens, in order of arrival. late_s: the 99th percentile of how much
    later than planned requests were sent.
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
    outputs: str
    bins: tuple[Bin, ...]
    settled_at_s: float | None = None
    settled_requests: int = 0
    settled_latency_sum_s: float = 0.0

    @property
    def mean_latency_s(self) -> float:
        return self.latency_sum_s / max(1, self.num_requests - self.num_failed)


@dataclass(slots=True)
class ServedBlock:
    """outcomes: one per arrival, in order."""

    outcomes: list[RequestOutcome]
    samples: list[Sample]
    seconds: float


async def serve_block(
    address: str,
    block: Block,
    prompts: Sequence[Prompt],
    num_burners: int = 1,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> ServedBlock:
    """Send every request at its time, and wait for all answers.

    num_burners: processes that take a core each from the moment at which the block throttles the machine.
    """
    samples: list[Sample] = []
    async with asyncio.TaskGroup() as group, throttle(block, num_burners):
        watcher = group.create_task(watch(address, samples))
        outcomes = await open_loop(address, block.arrivals, prompts, Progress(), timeout_s, block.at_once)
        watcher.cancel()
    ends = [outcome.finished_s for outcome in outcomes if outcome.finished_s is not None]
    return ServedBlock(outcomes, samples, max(ends, default=block.duration_s))


@contextlib.asynccontextmanager
async def throttle(block: Block, num_burners: int) -> AsyncIterator[None]:
    """Takes cores from the moment the block says to its end."""
    burners: list[subprocess.Popen[bytes]] = []
    waiting = None
    if block.throttle_at_s is not None:
        loop = asyncio.get_running_loop()
        waiting = loop.call_later(
            block.throttle_at_s, lambda: burners.extend(start_burner() for _ in range(num_burners))
        )
    try:
        yield
    finally:
        if waiting is not None:
            waiting.cancel()
        for burner in burners:
            burner.kill()
            burner.wait()


def figures_of(served: ServedBlock, block: Block, settled_at_s: float | None = None) -> BlockFigures:
    """settled_at_s: requests that arrived later are told apart."""
    done = [outcome for outcome in served.outcomes if not outcome.error]
    latencies = np.array([outcome.latency_s for outcome in done]) if done else np.zeros(1)
    errors: dict[str, int] = {}
    for outcome in served.outcomes:
        if outcome.error:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    first, last = (served.samples[0], served.samples[-1]) if served.samples else (None, None)
    settled = [o.latency_s for o in done if settled_at_s is not None and o.at_s >= settled_at_s]
    p50, p95, p99 = (float(value) for value in np.percentile(latencies, [50, 95, 99]))
    return BlockFigures(
        num_requests=len(served.outcomes),
        num_failed=len(served.outcomes) - len(done),
        errors=errors,
        latency_sum_s=float(latencies.sum()) if done else 0.0,
        latency_p50_s=p50,
        latency_p95_s=p95,
        latency_p99_s=p99,
        ttft_mean_s=float(np.mean([o.first_token_s - o.at_s for o in done if o.first_token_s is not None] or [0.0])),
        num_tokens=sum(outcome.num_tokens for outcome in done),
        seconds=served.seconds,
        num_steps=last.num_steps - first.num_steps if first and last else 0,
        num_row_steps=last.num_row_steps - first.num_row_steps if first and last else 0,
        num_proposed=sum(outcome.num_draft_tokens for outcome in done),
        num_accepted=sum(outcome.num_accepted_tokens for outcome in done),
        late_s=float(np.percentile([o.sent_s - o.at_s for o in served.outcomes], 99)),
        outputs=fingerprint(served.outcomes),
        bins=bins_of(served, block),
        settled_at_s=settled_at_s,
        settled_requests=len(settled),
        settled_latency_sum_s=float(sum(settled)),
    )


def fingerprint(outcomes: Sequence[RequestOutcome]) -> str:
    """The same for the same tokens of all requests, and for no others."""
    text = ";".join(",".join(map(str, outcome.output_ids)) for outcome in outcomes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bins_of(served: ServedBlock, block: Block) -> tuple[Bin, ...]:
    """The course of a block; what is served after its last arrival is in the last bin's time or later, and left out."""
    found = []
    for number in range(int(np.ceil(block.duration_s / BIN_S))):
        low, high = number * BIN_S, (number + 1) * BIN_S
        latencies = [o.latency_s for o in served.outcomes if not o.error and low <= o.at_s < high]
        inside = [sample for sample in served.samples if low <= sample.at_s <= high]
        first, last = (inside[0], inside[-1]) if len(inside) > 1 else (None, None)
        found.append(
            Bin(
                num_requests=len(latencies),
                latency_sum_s=float(sum(latencies)),
                num_steps=last.num_steps - first.num_steps if first and last else 0,
                num_row_steps=last.num_row_steps - first.num_row_steps if first and last else 0,
                num_proposed=last.num_draft_tokens - first.num_draft_tokens if first and last else 0,
            )
        )
    return tuple(found)


def settled_at(served: ServedBlock, num_steps: int) -> float | None:
    """When the worker had done so many steps since the block began; None if it never did."""
    return reached_steps_at(served.samples, num_steps)
