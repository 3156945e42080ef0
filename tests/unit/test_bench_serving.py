"""The serving benchmark sends what its workload asks for, hides no failure and no wrong output, and its intervals cover."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from speclen.bench.serving.load import BlockFigures, RequestOutcome, ServedBlock, busy_rate, figures_of, send_all
from speclen.bench.serving.outputs import OutputCheck
from speclen.bench.serving.plan import Plan, parse_policies
from speclen.bench.serving.prompts import KINDS
from speclen.bench.serving.report import rates_by_size, to_document
from speclen.bench.serving.rounds import (
    LEAST_BLOCKS,
    Comparison,
    PolicyFailedError,
    WorkerEndedError,
    mean_ratio,
    run_rounds,
)
from speclen.bench.serving.serve import check_context
from speclen.bench.serving.traffic import ALTERNATING, TRACKS, Arrival, make_block
from speclen.cli.support.output import UserError
from speclen.worker.config import WorkerConfig
from tests.support.fake_generation import FakeService, serving


def arrivals(times, num_tokens=10, at_once=None):
    return [Arrival(at_s, "code", 0, 4, num_tokens, at_once=at_once) for at_s in times]


def replay(service, track, timeout_s=10.0):
    async def run():
        async with serving(service) as address:
            prompts = [(index + 1, 2, 3, 4) for index in range(len(track))]
            return await send_all(address, track, prompts, timeout_s)

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


def test_in_a_closed_loop_requests_wait_until_few_enough_are_under_way():
    """Stages of 3 and of 1: no request of a stage is sent while as many as its number are under way."""
    track = [*arrivals([0.0] * 5, at_once=3), *arrivals([0.0] * 2, at_once=1)]
    outcomes = replay(FakeService(step_s=0.005), track)
    assert [outcome.sent_s for outcome in outcomes] == sorted(outcome.sent_s for outcome in outcomes)
    for arrival, outcome in zip(track, outcomes, strict=True):
        under_way = [other for other in outcomes if other.sent_s <= outcome.sent_s < other.finished_s]
        assert len(under_way) <= arrival.at_once
        assert outcome.at_s == outcome.sent_s < outcome.first_token_s
    figures = figures_of(ServedBlock(track, outcomes, 70, 70, max(one.finished_s for one in outcomes)))
    assert sum(figures.tokens_by_s) == figures.num_tokens == 70
    assert {size: tokens for size, (tokens, _) in figures.by_size.items()} == {3: 50, 1: 20}


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


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("track", TRACKS)
def test_blocks_are_deterministic_ordered_and_within_their_time(track, chat):
    block = make_block(track, CAPACITY, 5, seed=3, chat=chat)
    assert block == make_block(track, CAPACITY, 5, seed=3, chat=chat)
    assert block.arrivals != make_block(track, CAPACITY, 6, seed=3, chat=chat).arrivals
    assert block.arrivals != make_block(track, CAPACITY, 5, seed=4, chat=chat).arrivals
    times = [arrival.at_s for arrival in block.arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < block.duration_s
    assert {arrival.kind for arrival in block.arrivals} <= set(KINDS)
    assert {arrival.ends_itself for arrival in block.arrivals} == {chat}
    sizes, stages = [arrival.at_once for arrival in block.arrivals], [one.at_once for one in TRACKS[track].stages]
    assert [size for size, _ in itertools.groupby(sizes) if size] == [size for size, _ in itertools.groupby(stages)]


@pytest.mark.parametrize("mix", {mix for one in TRACKS.values() for stage in one.stages for _, mix in stage.mixes})
def test_the_shares_of_a_mix_add_up(mix):
    for kinds in (mix.kinds, mix.chat_kinds):
        assert sum(share for _, share in kinds) == pytest.approx(1.0)


def test_a_rollout_has_a_long_tail():
    for number in range(20):
        arrivals = make_block("rollout", CAPACITY, number).arrivals
        assert not any(arrival.streamed for arrival in arrivals), "a batch job reads whole answers"
        lengths = sorted(arrival.output_tokens for arrival in arrivals)
        assert len(lengths) == 64
        assert lengths[-1] > 2.5 * np.mean(lengths)


def test_a_request_longer_than_the_context_is_refused_before_anything_is_measured():
    plan = Plan(WorkerConfig(target="bundled:target"), track="rollout")
    check_context(arrivals([0.0], 90), [[1] * 10], 100, plan)
    with pytest.raises(
        ValueError, match="--track rollout has requests of 101 tokens, and the context of bundled:target"
    ):
        check_context(arrivals([0.0], 91), [[1] * 10], 100, plan)


def test_a_seeded_policy_needs_a_profile():
    with pytest.raises(UserError, match="--compare seeded needs --profile FILE"):
        parse_policies("adaptive,seeded", WorkerConfig(target="bundled:target"))


def test_a_block_asks_for_the_share_of_capacity_that_it_names():
    block = make_block("mixed", CAPACITY, duration_s=2_000)
    asked = sum(arrival.output_tokens for arrival in block.arrivals) / block.duration_s
    assert asked / CAPACITY == pytest.approx(MEAN_LOAD, rel=0.05)


# Seconds that each policy takes, in units of what the requests take at best.
SLOWNESS = {"adaptive": 1.0, "none": 2.0, "fixed:2": 1.2, "fixed:4": 1.21, "n-gram": 1.0}
REQUESTS = 50


def figures(number, policy, deviation=0.03, failed=0):
    """One block: its requests take more or less time for all policies, and each adds noise of its own."""
    shared = np.random.default_rng(number).lognormal(0, 0.5)
    seconds = (
        10.0 * shared * SLOWNESS[policy] * np.random.default_rng([number, *policy.encode()]).lognormal(0, deviation)
    )
    return BlockFigures(
        *(REQUESTS, failed, {"UNAVAILABLE: gone": failed} if failed else {}, REQUESTS * seconds, 0.1, 0.3, 0.5, 0.05),
        *(3000, seconds, 100, 300, 600, 300, 0.001),
    )


def comparison_with(serve=figures, rounds=20, closed=False, minutes=1e9):
    comparison, kept = Comparison(tuple(SLOWNESS), closed), []
    run_rounds(comparison, serve, itertools.count(0.0).__next__, 60 * minutes, rounds, lambda: kept.append(1))
    assert len(kept) >= len(comparison.rounds)
    return comparison


@pytest.mark.parametrize("closed", [False, True])
def test_ratios_are_those_of_the_policies_and_their_intervals_hold_them(closed):
    comparison = comparison_with(lambda number, name: figures(number, name, 0.1), closed=closed)
    for reference in ("none", "fixed:2", "n-gram"):
        interval = comparison.ratio("adaptive", reference).interval
        assert interval.low < SLOWNESS[reference] < interval.high
    assert comparison.best_fixed() in ("fixed:2", "fixed:4")


@pytest.mark.parametrize(("deviation", "num_rounds", "is_noted"), [(0.001, LEAST_BLOCKS, False), (0.2, 20, True)])
def test_rounds_end_when_all_ratios_are_resolved(deviation, num_rounds, is_noted):
    comparison = comparison_with(lambda number, name: figures(number, name, deviation))
    assert len(comparison.rounds) == num_rounds
    assert any("not resolved to 3%: none" in note for note in comparison.notes()) == is_noted


def failing(policy, at, error):
    def serve(number, name):
        if number == at and name == policy:
            raise error
        return figures(number, name, 0.2)

    return serve


@pytest.mark.parametrize(
    ("policy", "error", "num_rounds", "words"),
    [
        ("none", PolicyFailedError("no memory"), 20, "none has failed and serves no more: no memory"),
        ("adaptive", PolicyFailedError("no table"), 3, "adaptive has failed and serves no more: no table"),
        ("none", WorkerEndedError("killed"), 3, "the worker ended while none served (killed): the blocks"),
        ("none", KeyboardInterrupt(), 3, "interrupted: the blocks that were served are kept"),
    ],
)
def test_what_was_measured_before_a_failure_is_kept_and_marked(policy, error, num_rounds, words):
    comparison = comparison_with(failing(policy, 3, error))
    assert len(comparison.rounds) == num_rounds
    assert any(words in note for note in comparison.notes())
    assert [policy in one.blocks for one in comparison.rounds[:2]] == [True, True]
    assert not any(policy in one.blocks for one in comparison.rounds[2:])
    assert comparison.ratio("adaptive", policy).num_blocks == 2
    assert to_document(comparison, {"at_once": []}, so_far=True)["notes"][0].startswith("not finished")


def test_blocks_with_failed_requests_are_excluded_for_both_policies():
    comparison = comparison_with(lambda n, name: figures(n, name, failed=3 * (n == 2 and name == "none")), rounds=5)
    assert comparison.ratio("adaptive", "none").num_blocks == 4
    assert comparison.ratio("adaptive", "n-gram").num_blocks == 5
    assert comparison.errors() == {"none: UNAVAILABLE: gone": 3}


def test_rates_by_size_follow_littles_law():
    """Four at a time, 40 tokens in 8 s of summed latency: 20 tokens/s."""
    comparison = comparison_with(
        lambda n, name: replace(figures(n, name), by_size={4: (40, 8.0), 1: (10, 5.0)}), rounds=3
    )
    assert rates_by_size(comparison)["none"] == {"1": 2.0, "4": 20.0}


# Outputs.

ARRIVALS = [Arrival(0.0, "code", 0, 2, 3), Arrival(0.1, "code", 1, 2, 3, temperature=0.7, sampling_seed=4)]


def outputs(*tokens):
    return [RequestOutcome(0.0, finished_s=1.0, output_ids=ids) for ids in tokens]


def checked(second):
    check = OutputCheck()
    for name, found in (("none", outputs((5, 6, 7), (8, 9, 1))), ("n-gram", second)):
        check.add(name, ARRIVALS, [(1, 2), (3, 4)], found)
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
    """Speeds of two policies: blocks differ by a half, and each side by its own noise."""
    shared = np.exp(0.5 * rng.normal(size=number))
    noise = np.exp(deviation * rng.normal(size=(2, number)))
    return list(TRUE_RATIO * shared * noise[0]), list(shared * noise[1])


@pytest.mark.parametrize("number", [3, 6, 40])
def test_intervals_cover_the_truth(number):
    """The interval is exact for this noise: 180 of 200 is missed with odds below 1 in 300."""
    rng = np.random.default_rng(5)
    intervals = [mean_ratio(*blocks(rng, number)) for _ in range(200)]
    assert sum(one.low <= TRUE_RATIO <= one.high for one in intervals) >= 180
