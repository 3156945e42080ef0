"""The serving benchmark sends what its workload asks for, hides no failure and no wrong output, and its intervals cover."""

from __future__ import annotations

import asyncio
import itertools
from itertools import pairwise

import numpy as np
import pytest

from speclen.bench.serving.load import (
    BlockFigures,
    RequestOutcome,
    busy_rate,
    open_loop,
)
from speclen.bench.serving.outputs import OutputCheck
from speclen.bench.serving.prompts import KINDS
from speclen.bench.serving.rounds import Comparison, Round, ratio_of_sums, run_rounds
from speclen.bench.serving.traffic import ALTERNATING, TRACKS, Arrival, make_block
from tests.support.fake_generation import FakeService, serving


def arrivals(times, num_tokens=10):
    return [Arrival(at_s, "code", 0, 4, num_tokens) for at_s in times]


def replay(service, track, timeout_s=10.0, at_once=None):
    async def run():
        async with serving(service) as address:
            prompts = [(index + 1, 2, 3, 4) for index in range(len(track))]
            return await open_loop(address, track, prompts, timeout_s, at_once)

    return asyncio.run(run())


def test_requests_are_sent_at_their_time_whether_or_not_earlier_ones_are_done():
    """Each takes 0.3 s, and they come every 0.05 s: a closed loop would take 1.8 s, an open one 0.55 s."""
    track = arrivals([0.05 * index for index in range(6)], num_tokens=30)
    outcomes = replay(FakeService(step_s=0.01), track)
    assert [outcome.at_s for outcome in outcomes] == [arrival.at_s for arrival in track]
    assert all(outcome.sent_s >= outcome.at_s - 0.001 for outcome in outcomes)
    assert all(later.sent_s < earlier.finished_s for earlier, later in pairwise(outcomes))
    assert all(outcome.latency_s >= 0.3 for outcome in outcomes)
    assert all(outcome.at_s < outcome.first_token_s < outcome.finished_s for outcome in outcomes)


def test_latency_counts_from_the_planned_time():
    """A request of the past is late by all that time: what a client that fell behind would otherwise hide."""
    outcomes = replay(FakeService(step_s=0.001), arrivals([-1.0]))
    assert outcomes[0].latency_s > 1.0


def test_in_a_closed_loop_latency_counts_from_the_end_of_another_request():
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
def test_a_request_without_its_full_answer_fails_with_a_reason(service, timeout_s, num_failed, words):
    outcomes = replay(service, arrivals([0.02 * index for index in range(5)]), timeout_s)
    failed = [outcome for outcome in outcomes if outcome.error]
    assert len(failed) == num_failed
    assert all(words in outcome.error for outcome in failed)
    assert all(outcome.finished_s is None for outcome in failed)


# Blocks.


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


# Mean latency of each policy, in units of what the requests take at best.
SLOWNESS = {"adaptive": 1.0, "none": 2.0, "fixed:2": 1.2, "fixed:4": 1.21, "n-gram": 1.0}
REQUESTS = 50


def figures(slowness, rng, failed=0):
    latency = 10.0 * slowness * rng.lognormal(0, 0.03)
    return BlockFigures(
        *(REQUESTS, failed, {"UNAVAILABLE: gone": failed} if failed else {}, latency, 0.1, 0.3, 0.5, 0.05),
        *(3000, 6.0, 100, 300, 600, 300, 0.001),
    )


def make_round(number, order, failed=()):
    rng = np.random.default_rng(number)
    shared = rng.lognormal(0, 0.5)
    return Round(number, tuple(order), {n: figures(shared * SLOWNESS[n], rng, 3 * (n in failed)) for n in order})


def comparison_with(rounds=20, make=make_round, minutes=1e9, turns=1):
    comparison = Comparison(tuple(SLOWNESS), turns=turns)
    said = []
    run_rounds(comparison, make, itertools.count(0.0).__next__, 60 * minutes, rounds, said.append)
    return comparison, said


def test_ratios_are_those_of_the_policies_and_their_intervals_hold_them():
    comparison, _ = comparison_with()
    for reference in ("none", "fixed:2", "n-gram"):
        interval = comparison.ratio("adaptive", reference).interval
        assert interval.value == pytest.approx(1 / SLOWNESS[reference], rel=0.06)
        assert interval.low < 1 / SLOWNESS[reference] < interval.high
    assert comparison.best_fixed() in ("fixed:2", "fixed:4")


def test_blocks_with_failures_are_excluded_for_both_policies():
    comparison, _ = comparison_with(make=lambda n, order: make_round(n, order, ("none",) if n == 2 else ()), rounds=5)
    assert comparison.ratio("adaptive", "none").num_blocks == 4
    assert comparison.ratio("adaptive", "n-gram").num_blocks == 5
    assert comparison.errors() == {"none: UNAVAILABLE: gone": 3}


# Outputs.

ARRIVALS = [Arrival(0.0, "code", 0, 2, 3), Arrival(0.1, "code", 1, 2, 3, temperature=0.7, sampling_seed=4)]


def outputs(*tokens):
    return [RequestOutcome(0.0, finished_s=1.0, output_ids=ids) for ids in tokens]


def checked(second):
    check = OutputCheck()
    check.add(ARRIVALS, [(1, 2), (3, 4)], {"none": outputs((5, 6, 7), (8, 9, 1)), "n-gram": second})
    return check


def test_a_tie_is_counted_and_a_wrong_token_ends_the_run():
    asked = []

    def judge(one):
        asked.append(one)
        return 0.4, 11.0

    check = checked(outputs((5, 6, 7), (8, 2, 3)))
    verdict = check.verdict(judge, "bfloat16")
    assert (verdict["num_same"], verdict["num_parted"], verdict["num_greedy_parted"]) == (1, 1, 0)
    assert (asked[0].prompt, asked[0].prefix, asked[0].tokens, asked[0].sampling_seed) == ((3, 4), (8,), (9, 2), 4)
    with pytest.raises(ValueError, match="none and n-gram generated different tokens where there is no tie"):
        check.verdict(judge, "float32")
    with pytest.raises(ValueError, match=r"lies 0\.4 logits below"):
        check.verdict(lambda one: (0.4, 8.0), "bfloat16")  # 5% of the largest logit


def test_failed_requests_have_no_output_to_compare():
    second = outputs((5, 6, 7), ())
    second[1].error = "UNAVAILABLE: gone"
    assert checked(second).num_compared == 1


def test_a_truncated_output_is_not_a_tie():
    with pytest.raises(ValueError, match="3 and 2 tokens for one request"):
        checked(outputs((5, 6), (8, 9, 1)))


# Intervals.

TRUE_RATIO = 1.1


def blocks(rng, number, deviation=0.1):
    """Latency sums of two policies: blocks differ by a half, and each side by its own noise."""
    shared = np.exp(0.5 * rng.normal(size=number))
    noise = np.exp(deviation * rng.normal(size=(2, number)))
    return list(TRUE_RATIO * shared * noise[0]), list(shared * noise[1])


@pytest.mark.parametrize("number", [6, 12, 40])
def test_intervals_cover_the_truth(number):
    """Nominally 95%. Measured over 2,000 trials it is 94 to 96%; 176 of 200 is missed with odds below 1 in 10,000."""
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        interval = ratio_of_sums(*blocks(rng, number), seed=trial)
        covered += interval.low <= TRUE_RATIO <= interval.high
    assert covered >= 176
