"""One block: what the worker did is watched, and cores are taken and given back when the block says so."""

import asyncio
import subprocess
import sys

import pytest

from speclen.bench.serving import block as module
from speclen.bench.serving.block import figures_of, fingerprint, serve_block, settled_at
from speclen.bench.serving.tracks import Arrival, Block
from tests.support.fake_generation import FakeService, serving


def make_block(**changes):
    arrivals = tuple(Arrival(0.1 * index, "code", 0, 2, 20) for index in range(5))
    return Block("x", 0, duration_s=0.5, arrivals=arrivals, **changes)


def serve(block, service):
    async def run():
        async with serving(service) as address:
            return await serve_block(address, block, [(1, 2)] * len(block.arrivals), num_burners=2)

    return asyncio.run(run())


def test_figures_count_what_was_served():
    block = make_block()
    served = serve(block, FakeService(step_s=0.02))
    figures = figures_of(served, block)
    assert (figures.num_requests, figures.num_failed, figures.num_tokens) == (5, 0, 100)
    assert figures.latency_sum_s == pytest.approx(sum(outcome.latency_s for outcome in served.outcomes))
    assert figures.latency_p50_s <= figures.latency_p95_s <= figures.latency_p99_s
    assert 0 < figures.ttft_mean_s < figures.mean_latency_s
    assert [each.num_requests for each in figures.bins] == [5]
    assert figures.bins[0].latency_sum_s == pytest.approx(figures.latency_sum_s)
    assert figures.outputs == fingerprint(served.outcomes)


def test_other_tokens_have_another_fingerprint():
    served = serve(make_block(), FakeService(step_s=0.001))
    before = fingerprint(served.outcomes)
    served.outcomes[3].output_ids = (2, *served.outcomes[3].output_ids[1:])
    assert fingerprint(served.outcomes) != before


def test_a_failed_request_is_counted_and_named():
    block = make_block()
    figures = figures_of(serve(block, FakeService(step_s=0.001, fail_after=2)), block)
    assert figures.num_failed == 3
    assert figures.errors == {"RESOURCE_EXHAUSTED: the queue is full": 3}


def test_what_came_after_the_worker_had_settled_is_told_apart():
    block = make_block()
    served = serve(block, FakeService(step_s=0.02))
    at_s = settled_at(served, 3)
    assert at_s is not None
    figures = figures_of(served, block, settled_at_s=0.25)
    assert figures.settled_requests == 2  # those of 0.3 and 0.4 s
    assert 0 < figures.settled_latency_sum_s < figures.latency_sum_s
    assert settled_at(served, 10_000) is None


def test_cores_are_taken_half_way_and_given_back(monkeypatch):
    burners = []

    def start() -> subprocess.Popen:
        burners.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return burners[-1]

    monkeypatch.setattr(module, "start_burner", start)
    serve(make_block(), FakeService(step_s=0.001))
    assert not burners
    serve(make_block(throttle_at_s=0.2), FakeService(step_s=0.02))
    assert len(burners) == 2
    assert all(burner.poll() is not None for burner in burners)


def test_a_block_that_ends_before_its_throttling_starts_nothing(monkeypatch):
    monkeypatch.setattr(module, "start_burner", lambda: 1 / 0)
    serve(make_block(throttle_at_s=60.0), FakeService(step_s=0.001))
