"""A block is the same for everybody: drawn from its seed and number, at the rates and burstiness that its track names."""

import itertools

import numpy as np
import pytest

from speclen.bench.serving import chat
from speclen.bench.serving.prompts import HEAD_TOKENS, KINDS, PromptDrawer
from speclen.bench.serving.recipes import ALTERNATING, CHAT, MEAN_OUTPUT_TOKENS, MIXED, TRACKS
from speclen.bench.serving.tracks import TURN_TOKENS, arrival_times, draw_requests, make_block
from tests.support import tiny_models

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


def test_answers_that_the_model_ends_are_asked_for_by_their_expected_length():
    block = make_block("chat", CAPACITY, duration_s=5_000)
    assert all(arrival.ends_itself and arrival.output_tokens == CHAT.most_tokens for arrival in block.arrivals)
    asked = len(block.arrivals) * CHAT.mean_tokens / block.duration_s
    assert asked / CAPACITY == pytest.approx(MEAN_LOAD, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(cv):
    times = arrival_times(np.random.default_rng(1), rate=10.0, length_s=20_000.0, cv=cv)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_short_stretches_have_the_rate_that_was_asked_for(cv):
    """Seven requests each on average, also where they come in bursts of twice as many: as if it had gone on for long."""
    rng = np.random.default_rng(3)
    numbers = [len(arrival_times(rng, rate=3.5, length_s=2.0, cv=cv)) for _ in range(4000)]
    assert np.mean(numbers) == pytest.approx(7.0, rel=0.06)
    bounds = arrival_times(np.random.default_rng(4), rate=3.5, length_s=2.0, cv=cv)
    assert all((bounds >= 0) & (bounds < 2.0))


def test_what_is_asked_has_the_shares_of_its_mix():
    """3,000 requests: shares deviate by less than 3 points with odds of a thousand to one."""
    found = draw_requests(np.random.default_rng(0), np.linspace(0, 1, 3000), MIXED)
    for kind, share in MIXED.kinds:
        assert np.mean([arrival.kind == kind for arrival in found]) == pytest.approx(share, abs=0.03)
    for temperature in MIXED.temperatures:
        assert np.mean([arrival.temperature == temperature for arrival in found]) == pytest.approx(1 / 3, abs=0.03)
    assert np.mean([arrival.output_tokens for arrival in found]) == pytest.approx(MEAN_OUTPUT_TOKENS, rel=0.05)
    assert len({arrival.sampling_seed for arrival in found}) > 2990


def test_turns_of_a_conversation_begin_with_what_was_said_before():
    found = draw_requests(np.random.default_rng(0), np.linspace(0, 1, 300), MIXED)
    by_seed = {}
    for arrival in found:
        if arrival.kind == "chat":
            by_seed.setdefault(arrival.prompt_seed, []).append(arrival.prompt_tokens)
    turns = [lengths for lengths in by_seed.values() if len(lengths) > 1]
    assert turns
    assert all(b - a == TURN_TOKENS for lengths in turns for a, b in itertools.pairwise(lengths))
    drawer = PromptDrawer(tiny_models.tokenizer())
    first, second = (drawer.draw("chat", tokens, 5) for tokens in (64, 128))
    assert second[:64] == first


def test_edits_begin_as_the_file_that_they_edit():
    drawer = PromptDrawer(tiny_models.tokenizer())
    for kind in set(KINDS) - set(chat.KINDS):
        prompt = drawer.draw(kind, 128, 7)
        assert len(prompt) == 128
        assert prompt == drawer.draw(kind, 128, 7) != drawer.draw(kind, 128, 8)
    edit = drawer.draw("edit", 128, 7)
    assert edit[-HEAD_TOKENS:] == edit[:HEAD_TOKENS]
    with pytest.raises(ValueError, match="'poem'"):
        drawer.draw("poem", 10, 0)
    with pytest.raises(ValueError, match="edit needs at least"):
        drawer.draw("edit", 10, 0)
    with pytest.raises(ValueError, match="at most"):
        drawer.draw("chat", 10_000, 0)


def test_the_fourth_block_is_burstier_than_the_first():
    sparse, dense = (make_block("mixed", CAPACITY, number, duration_s=400).arrivals for number in (0, 3))
    spread = [np.diff([a.at_s for a in found]).std() * len(found) for found in (sparse, dense)]
    assert spread[1] > 1.5 * spread[0]


@pytest.mark.parametrize(("number", "at_once"), [(0, 16), (3, 2), (4, 1), (5, 16)])
def test_closed_loops_take_turns_in_how_many_requests_they_have_at_a_time(number, at_once):
    block = make_block("closed-copying", CAPACITY, number)
    assert (block.at_once, len(block.arrivals)) == (at_once, 16 + 4 * at_once)
    assert {arrival.kind for arrival in block.arrivals} <= {"edit", "extract", "quote"}
    assert len(make_block("closed", CAPACITY, number, duration_s=0.01).arrivals) == at_once
    assert make_block("mixed", CAPACITY, number).at_once is None


def test_a_block_that_burstiness_leaves_empty_is_drawn_again():
    assert all(make_block("mixed", 60.0, number, duration_s=2.0).arrivals for number in range(20))


@pytest.mark.parametrize(
    ("track", "changes", "words"),
    [
        ("rush-hour", {}, "'rush-hour'"),
        ("mixed", {"capacity_tokens_per_s": 0.0}, "capacity"),
        ("mixed", {"duration_s": float("nan")}, "duration"),
        ("mixed", {"capacity_tokens_per_s": 1e12}, "--capacity"),
        ("mixed", {"capacity_tokens_per_s": 1e-9}, "no request"),
    ],
)
def test_what_is_no_track_is_named(track, changes, words):
    with pytest.raises(ValueError, match=words):
        make_block(track, **{"capacity_tokens_per_s": CAPACITY, **changes})
