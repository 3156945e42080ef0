"""A block is the same for everybody: drawn from its seed and number, at the rates and burstiness that its track names."""

import numpy as np
import pytest

from speclen.bench.serving.prompts import KINDS
from speclen.bench.serving.recipes import ALTERNATING, TRACKS
from speclen.bench.serving.tracks import arrival_times, make_block

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


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(cv):
    times = arrival_times(np.random.default_rng(1), rate=10.0, length_s=20_000.0, cv=cv)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


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
