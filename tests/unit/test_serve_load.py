"""The client measures what a request waits for, and hides neither a late answer nor a missing one."""

import asyncio
import math
from itertools import pairwise

import pytest

from speclen.bench.serving.capacity import capacity, capacity_of, is_settled
from speclen.bench.serving.load import Yield, closed_loop, make_request, open_loop, request_of
from speclen.bench.serving.tracks import Arrival
from speclen.bench.serving.watch import watch
from tests.support.fake_generation import FakeService, serving


def arrivals(times, num_tokens=10):
    return [Arrival(at_s, "code", 0, 4, num_tokens) for at_s in times]


def replay(service, track, timeout_s=10.0, samples=None, at_once=None):
    async def run():
        async with serving(service) as address:
            watcher = asyncio.create_task(watch(address, samples if samples is not None else []))
            prompts = [(index + 1, 2, 3, 4) for index in range(len(track))]
            outcomes = await open_loop(address, track, prompts, timeout_s, at_once)
            watcher.cancel()
            return outcomes

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
    assert [outcome.index for outcome in sorted(outcomes, key=lambda one: one.at_s)] == list(range(6))
    assert outcomes[-1].at_s >= 0.2, "after two others"


def test_every_prompt_reaches_the_server_once():
    service = FakeService(step_s=0.001)
    replay(service, arrivals([0.0, 0.01, 0.02]))
    assert sorted(service.prompts) == [(1, 2, 3, 4), (2, 2, 3, 4), (3, 2, 3, 4)]


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


def test_no_server_at_all_is_a_failure_of_every_request_and_not_of_the_client():
    outcomes = asyncio.run(open_loop("127.0.0.1:1", arrivals([0.0, 0.1]), [(1,), (1,)], 5.0))
    assert [outcome.error.partition(":")[0] for outcome in outcomes] == ["UNAVAILABLE"] * 2


def test_requests_ask_for_the_same_work_under_every_policy():
    """Nothing about speculation is in them: that is the policy's. With a seed, so that tokens are the same as well."""
    request = make_request((1,), 5, 0.7, 12)
    assert request.sampling_params.ignore_eos
    assert (request.sampling_params.temperature, request.sampling_params.seed) == (pytest.approx(0.7), 12)
    assert not request.HasField("speculation")


def closed(num_requests, limit_s=math.inf, num_tokens=20, step_s=0.01, num_settling=0):
    """Four at a time; what they brought, and how many requests came."""

    async def run():
        async with serving(FakeService(step_s=step_s)) as address:
            waiting = iter([make_request((1, 2), num_tokens)] * num_requests)
            found = await closed_loop(address, 4, waiting, limit_s, num_settling)
            return found, num_requests - len(list(waiting))

    return asyncio.run(run())


def test_a_closed_loop_counts_the_tokens_until_fewer_would_run():
    """4 clients, a token every 10 ms each: 400 tokens a second, less what a busy machine loses."""
    found, num_asked = closed(12)
    assert num_asked == 12
    # The four that end last do so at about the same time, and the first of them is the end.
    assert 8 * 20 + 20 <= found.tokens <= 12 * 20
    assert found.tokens_per_s <= 420


def test_a_closed_loop_ends_with_its_time():
    found, num_asked = closed(100_000, limit_s=0.5)
    assert 0.5 <= found.seconds < 30.0
    assert num_asked < 1000
    assert 4 <= found.tokens <= 420 * found.seconds


def test_a_closed_loop_counts_nothing_before_its_first_requests_have_ended():
    """Of 12 requests of 20 tokens, the first four."""
    found, num_asked = closed(12, num_settling=4)
    assert num_asked == 12
    assert 4 * 20 <= found.tokens <= 8 * 20
    assert found.tokens_per_s <= 420
    with pytest.raises(ValueError, match="too few"):
        closed(4, num_settling=8)


def test_counters_of_a_worker_are_watched():
    samples = []
    replay(FakeService(step_s=0.02), arrivals([0.0], num_tokens=40), samples=samples)
    assert len(samples) >= 3
    steps = samples[-1].num_steps - samples[0].num_steps
    assert samples[-1].num_row_steps - samples[0].num_row_steps == steps > 0


# Capacity.


@pytest.mark.parametrize(
    ("rates", "used"),
    [
        ((300, 500, 510), 505),  # shapes were new in the first
        ((500, 505), 502.5),
        ((100, 200, 300, 400, 500, 600), 550),  # it never agrees
    ],
)
def test_capacity_is_measured_at_the_best_length_until_two_visits_agree(rates, used):
    later, visits = iter(rates), []

    def visit(arm):
        visits.append(arm.speculation_length)
        rate = next(later) if len(visits) > 6 else 90 + arm.speculation_length
        return Yield(100 * rate, 100.0)

    found = capacity(visit, 2)
    assert visits == [0, 1, 2, 0, 1, 2] + [2] * len(rates)
    assert found == list(rates)
    assert capacity_of(found) == used
    assert is_settled(found) == (len(rates) < 6)
