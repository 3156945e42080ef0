"""One block: what was served and what the worker did are counted."""

import asyncio

import pytest

from speclen.bench.serving.block import figures_of, serve_block
from speclen.bench.serving.tracks import Arrival, Block
from tests.support.fake_generation import FakeService, serving


def make_block():
    arrivals = tuple(Arrival(0.1 * index, "code", 0, 2, 20) for index in range(5))
    return Block("x", 0, duration_s=0.5, arrivals=arrivals)


def serve(block, service):
    async def run():
        async with serving(service) as address:
            return await serve_block(address, block, [(1, 2)] * len(block.arrivals))

    return asyncio.run(run())


def test_figures_count_what_was_served():
    block = make_block()
    served = serve(block, FakeService(step_s=0.02))
    figures = figures_of(served)
    assert (figures.num_requests, figures.num_failed, figures.num_tokens) == (5, 0, 100)
    assert figures.latency_sum_s == pytest.approx(sum(outcome.latency_s for outcome in served.outcomes))
    assert figures.latency_p50_s <= figures.latency_p95_s <= figures.latency_p99_s
    assert 0 < figures.ttft_mean_s < figures.mean_latency_s
    assert figures.num_row_steps >= figures.num_steps > 0


def test_a_failed_request_is_counted_and_named():
    block = make_block()
    figures = figures_of(serve(block, FakeService(step_s=0.001, fail_after=2)))
    assert figures.num_failed == 3
    assert figures.errors == {"RESOURCE_EXHAUSTED: the queue is full": 3}
