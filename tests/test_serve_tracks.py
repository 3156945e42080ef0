"""A track is the same for everybody: drawn from its seed, at the rates and burstiness that it names."""

import dataclasses

import numpy as np
import pytest

from speclen.bench.serving.track_file import load_track, save_track
from speclen.bench.serving.tracks import MEAN_OUTPUT_TOKENS, SCENARIOS, arrival_times, make_track, scenario_of

CAPACITY = 700.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_named_tracks_are_deterministic_ordered_and_within_their_time(name):
    track = make_track(name, CAPACITY, seed=3)
    assert track == make_track(name, CAPACITY, seed=3)
    assert track.arrivals != make_track(name, CAPACITY, seed=4).arrivals
    times = [arrival.at_s for arrival in track.arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < track.duration_s
    # Enough requests, after the warm-up, for the intervals of a comparison.
    assert len(track.counted()) > 100
    assert all(track.arrivals[index].at_s >= track.warm_up_s for index in track.counted())
    assert sum(segment.share for segment in SCENARIOS[name].segments) == pytest.approx(1.0)


def test_a_track_asks_for_the_share_of_capacity_that_it_names():
    """Long enough that the relative deviation of the tokens asked for is about 1%."""
    track = make_track("steady-low", CAPACITY, seed=0, duration_s=20_000)
    asked = sum(arrival.output_tokens for arrival in track.arrivals) / track.duration_s
    assert asked / CAPACITY == pytest.approx(0.15, rel=0.05)
    assert make_track("steady-low", CAPACITY, scale=2.0, duration_s=20_000).arrivals[-1].at_s <= 20_000
    twice = make_track("steady-low", CAPACITY, seed=0, duration_s=20_000, scale=2.0)
    assert len(twice.arrivals) / len(track.arrivals) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(cv):
    times = arrival_times(np.random.default_rng(1), rate=10.0, rate_end=10.0, length_s=20_000.0, cv=cv)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_ramp_brings_a_quarter_of_its_requests_in_its_first_half():
    times = arrival_times(np.random.default_rng(2), rate=0.0, rate_end=10.0, length_s=4_000.0, cv=1.0)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert np.mean(times < 2_000.0) == pytest.approx(0.25, abs=0.02)


def test_events_and_kinds_fall_where_the_scenario_says():
    shift = make_track("prompt-shift", CAPACITY)
    half = shift.duration_s / 2
    assert all((arrival.kind == "prose") == (arrival.at_s >= half) for arrival in shift.arrivals)
    assert make_track("throttle", CAPACITY, duration_s=60).throttle_at_s == 30
    assert make_track("cold", CAPACITY).settle_steps == 500
    rates = np.histogram([a.at_s for a in make_track("burst", CAPACITY).arrivals], bins=40, range=(0, 150))[0]
    assert rates.max() > 5 * np.median(rates)


def test_a_spelled_out_track_has_its_segments():
    scenario = scenario_of("for=30 load=0.2; for=90 load=0.2..0.8 cv=2 kind=prose")
    assert scenario.duration_s == 120
    first, second = scenario.segments
    assert (first.share, first.load, first.load_end, first.cv, first.kind) == (0.25, 0.2, 0.2, 1.0, "code")
    assert (second.share, second.load, second.load_end, second.cv, second.kind) == (0.75, 0.2, 0.8, 2.0, "prose")


def test_a_saved_track_is_replayed_exactly(tmp_path):
    track = make_track("throttle", CAPACITY, seed=7, duration_s=40)
    save_track(track, tmp_path / "track.json")
    assert load_track(tmp_path / "track.json") == track


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("rush-hour", {}, "'rush-hour'"),
        ("for=10", {}, "for=10"),
        ("for=10 load=0.5 speed=2", {}, "speed"),
        ("for=-1 load=0.5", {}, "for=-1"),
        ("for=10 load=fast", {}, "load=fast"),
        ("cold", {"capacity_tokens_per_s": 0.0}, "capacity"),
        ("cold", {"duration_s": float("nan")}, "duration"),
        ("cold", {"scale": 1e9}, "--scale"),
        ("for=10 load=0", {}, "no request"),
    ],
)
def test_what_is_no_track_is_named(name, changes, words):
    with pytest.raises(ValueError, match=words):
        make_track(name, **{"capacity_tokens_per_s": CAPACITY, **changes})


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "other"}', '{"format": "speclen-track-1", "arrivals": [[1]]}']
)
def test_a_file_that_is_no_track_is_named(tmp_path, content):
    file = tmp_path / "track.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"track\.json"):
        load_track(file)


def test_arrivals_out_of_order_are_refused(tmp_path):
    track = make_track("steady-low", CAPACITY, duration_s=60)
    save_track(dataclasses.replace(track, arrivals=track.arrivals[::-1]), tmp_path / "track.json")
    with pytest.raises(ValueError, match="order"):
        load_track(tmp_path / "track.json")


def test_outputs_have_the_mean_that_rates_are_computed_with():
    track = make_track("steady-high", CAPACITY, duration_s=5_000)
    assert np.mean([a.output_tokens for a in track.arrivals]) == pytest.approx(MEAN_OUTPUT_TOKENS, rel=0.05)
