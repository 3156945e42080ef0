"""A block asks for what its track names, and the client hides neither a late answer nor a missing one."""

import asyncio
from itertools import pairwise

import pytest

from speclen.bench.serving.block import figures_of, serve_block
from speclen.bench.serving.capacity import busy_rate
from speclen.bench.serving.load import RequestOutcome, open_loop, request_of
from speclen.bench.serving.prompts import KINDS
from speclen.bench.serving.recipes import ALTERNATING, TRACKS
from speclen.bench.serving.tracks import Arrival, Block, make_block
from tests.support.fake_generation import FakeService, serving


def arrivals(times, num_tokens=10):
    return [Arrival(at_s, "code", 0, 4, num_tokens) for at_s in times]


def replay(service, track, timeout_s=10.0, at_once=None):
    async def run():
        async with serving(service) as address:
            prompts = [(index + 1, 2, 3, 4) for index in range(len(track))]
            return await open_loop(address, track, prompts, timeout_s, at_once)

    return asyncio.run(run())


def test_requests_are_sent_when_the_track_says_and_not_when_earlier_ones_are_done():
    """Each takes 0.3 s, and they come every 0.05 s: a closed loop would take 1.8 s, an open one 0.55 s."""
    track = arrivals([0.05 * index for index in range(6)], num_tokens=30)
    outcomes = replay(FakeService(step_s=0.01), track)
    assert [outcome.at_s for outcome in outcomes] == [arrival.at_s for arrival in track]
    assert all(outcome.sent_s >= outcome.at_s - 0.001 for outcome in outcomes)
    assert all(later.sent_s < earlier.finished_s for earlier, later in pairwise(outcomes))
    assert all(outcome.latency_s >= 0.3 for outcome in outcomes)
    assert all(outcome.at_s < outcome.first_token_s < outcome.finished_s for outcome in outcomes)


def test_latency_counts_from_the_moment_of_the_track():
    """A request of the past is late by all that time: what a client that fell behind would otherwise hide."""
    outcomes = replay(FakeService(step_s=0.001), arrivals([-1.0]))
    assert outcomes[0].latency_s > 1.0


def test_in_a_closed_loop_a_request_is_sent_when_another_ends_and_latency_counts_from_then():
    track = arrivals([0.0] * 6, num_tokens=10)
    outcomes = replay(FakeService(step_s=0.01), track, at_once=2)
    for outcome in outcomes:
        under_way = [other for other in outcomes if other.at_s <= outcome.at_s < other.finished_s]
        assert len(under_way) <= 2
        assert outcome.at_s <= outcome.sent_s < outcome.first_token_s
    assert sorted(outcomes, key=lambda one: one.at_s) == outcomes
    assert outcomes[-1].at_s >= 0.2, "after two others"


@pytest.mark.parametrize(
    ("service", "timeout_s", "num_failed", "words"),
    [
        (FakeService(step_s=0.001, fail_after=2), 10.0, 3, "RESOURCE_EXHAUSTED: the queue is full"),
        (FakeService(step_s=0.001, short_by=1), 10.0, 5, "9 tokens instead of 10"),
        (FakeService(step_s=1.0), 0.3, 5, "DEADLINE_EXCEEDED"),
    ],
)
def test_a_request_without_its_full_answer_has_failed_and_says_why(service, timeout_s, num_failed, words):
    outcomes = replay(service, arrivals([0.02 * index for index in range(5)]), timeout_s)
    failed = [outcome for outcome in outcomes if outcome.error]
    assert len(failed) == num_failed
    assert all(words in outcome.error for outcome in failed)
    assert all(outcome.finished_s is None for outcome in failed)


def test_an_answer_that_the_model_may_end_is_whole_at_any_length():
    track = [Arrival(0.0, "chat-code", 0, 0, 10, ends_itself=True)]
    outcomes = replay(FakeService(step_s=0.001, short_by=4), track)
    assert (outcomes[0].error, outcomes[0].num_tokens) == ("", 6)
    assert not request_of(track[0], (1,)).sampling_params.ignore_eos


# Blocks.


async def test_figures_count_what_was_served():
    asked = arrivals([0.1 * index for index in range(5)], num_tokens=20)
    async with serving(FakeService(step_s=0.02)) as address:
        found = await serve_block(address, Block("x", 0, duration_s=0.5, arrivals=tuple(asked)), [(1, 2)] * 5)
    figures = figures_of(found)
    assert (figures.num_requests, figures.num_failed, figures.num_tokens) == (5, 0, 100)
    assert figures.latency_sum_s == pytest.approx(sum(outcome.latency_s for outcome in found.outcomes))
    assert figures.latency_p50_s <= figures.latency_p95_s <= figures.latency_p99_s
    assert 0 < figures.ttft_mean_s < figures.mean_latency_s
    assert figures.num_row_steps >= figures.num_steps > 0


# Capacity.


def test_capacity_counts_tokens_while_every_slot_is_busy():
    """Two slots: the last request is sent after 2 s, when half of the third answer has come."""
    ends = [(0.0, 1.0), (0.0, 2.0), (1.0, 3.0), (2.0, 3.0)]
    outcomes = [RequestOutcome(begin, begin, finished_s=end, num_tokens=10) for begin, end in ends]
    assert busy_rate(outcomes) == pytest.approx((10 + 10 + 5) / 2)
    outcomes[1].error = "UNAVAILABLE: gone"
    with pytest.raises(ValueError, match="measuring the capacity failed: UNAVAILABLE: gone"):
        busy_rate(outcomes)


CAPACITY = 1400.0
MEAN_LOAD = sum(share * load for share, load in ALTERNATING)


@pytest.mark.parametrize("track", TRACKS)
def test_blocks_are_deterministic_ordered_and_within_their_time(track):
    block = make_block(track, CAPACITY, 5, seed=3)
    assert block == make_block(track, CAPACITY, 5, seed=3)
    assert block.arrivals != make_block(track, CAPACITY, 6, seed=3).arrivals
    assert block.arrivals != make_block(track, CAPACITY, 5, seed=4).arrivals
    times = [arrival.at_s for arrival in block.arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < block.duration_s
    kinds = dict(TRACKS[track].mix.kinds)
    assert sum(kinds.values()) == pytest.approx(1.0)
    assert set(kinds) <= set(KINDS)


def test_a_block_asks_for_the_share_of_capacity_that_it_names():
    block = make_block("mixed", CAPACITY, duration_s=2_000)
    asked = sum(arrival.output_tokens for arrival in block.arrivals) / block.duration_s
    assert asked / CAPACITY == pytest.approx(MEAN_LOAD, rel=0.05)
