"""The law: each position's acceptance is rows that passed over rows that reached it, whatever the lengths were."""

import json

import numpy as np
import pytest

from speclen.controller.estimator.acceptance import AcceptanceModel, band_of

# Published for a real pair; the geometric law through its first entry is far off at the end.
REAL_SURVIVAL = (0.78, 0.58, 0.43, 0.33, 0.27, 0.22, 0.19)


def counts(runs: np.ndarray, length: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Passed and reached rows by position for one step."""
    passed = np.array([(runs > i).sum() if i < length else 0 for i in range(positions)], dtype=float)
    reached = np.array([(runs >= i).sum() if i < length else 0 for i in range(positions)], dtype=float)
    return passed, reached


def feed(model: AcceptanceModel, survival: tuple[float, ...], lengths: list[int], batch: int, seed: int) -> list[float]:
    """Steps of rows whose runs follow a survival curve; returns the detector's statistics."""
    rng = np.random.default_rng(seed)
    chances = -np.diff([1.0, *survival, 0.0])
    fired = []
    for length in lengths:
        runs = np.minimum(rng.choice(len(chances), size=batch, p=chances), length)
        passed, reached = counts(runs, length, model.max_length)
        fired.append(model.update(passed[None], reached[None], np.array([band_of(batch)])))
    return fired


@pytest.mark.parametrize("lengths", [[7], [1, 2, 3, 7], [4, 7]])
def test_survival_is_found_whatever_lengths_are_played(lengths):
    """Censoring by short lengths does no harm.

    With a memory of 600 reports of 16 rows, 0.04 is more than five standard errors at every position.
    """
    model = AcceptanceModel(7, 6)
    feed(model, REAL_SURVIVAL, lengths * (1200 // len(lengths)), 16, seed=1)
    assert model.acceptance.cumprod() == pytest.approx(REAL_SURVIVAL, abs=0.04)


def test_a_real_curve_is_not_taken_for_a_geometric_one():
    """Survival 0.78 ... 0.19: a geometric fit through length 4 promises +2.6% tokens from 4 to 7, the curve +22%."""
    model = AcceptanceModel(7, 6)
    feed(model, REAL_SURVIVAL, [7] * 800, 16, seed=2)
    tokens = model.expected_tokens[band_of(16)]
    assert tokens[7] / tokens[4] == pytest.approx((1 + sum(REAL_SURVIVAL)) / (1 + sum(REAL_SURVIVAL[:4])), rel=0.03)


def test_positions_beyond_the_length_keep_their_relation_to_the_shallower_ones():
    """Only length 2 is played: position 5 is not measured, and follows what happens to positions 1 and 2."""
    model = AcceptanceModel(7, 6)
    model.seed((0.8, 0.64, 0.512, 0.41, 0.328, 0.262, 0.21), (4000,) * 7)
    feed(model, (0.4, 0.16), [2] * 400, 16, seed=3)
    assert model.reached[4] == 0.0
    assert model.acceptance[4] == pytest.approx(0.4, abs=0.05)


def test_plain_decoding_teaches_nothing_but_time_passes():
    model = AcceptanceModel(4, 3)
    feed(model, (0.9, 0.8, 0.7, 0.6), [4] * 50, 4, seed=4)
    before = model.reached.copy()
    feed(model, (0.9,), [0] * 100, 4, seed=5)
    assert model.reached == pytest.approx(before * np.exp(-100 / 600))


def test_a_fall_is_found_and_only_recent_rows_count_then():
    model = AcceptanceModel(7, 6)
    assert not any(feed(model, REAL_SURVIVAL, [5] * 400, 16, seed=6))
    fired = feed(model, tuple(0.4**i for i in range(1, 8)), [5] * 40, 16, seed=7)
    assert min(fired) < 0.0
    assert np.flatnonzero(fired)[0] < 10
    assert model.acceptance[0] == pytest.approx(0.4, abs=0.06)


def test_rows_that_stay_do_not_look_like_a_change():
    """A hard request decodes alone for 40 steps, then an easy one: the same mix for 4,000 steps, few alarms at most."""
    model, rng = AcceptanceModel(4, 1), np.random.default_rng(8)
    alarms = 0
    for _ in range(100):
        acceptance = rng.choice([0.4, 0.9])
        alarms += sum(
            map(bool, feed(model, tuple(acceptance**i for i in range(1, 5)), [4] * 40, 1, int(rng.integers(1e9))))
        )
    assert model.dispersion > 3.0  # it has found out that neighbouring steps agree
    assert alarms <= 12  # taking rows for independent would raise more than 50


def test_a_band_of_load_may_differ_from_the_others():
    model = AcceptanceModel(4, 6)
    for seed in range(150):
        feed(model, (0.9, 0.8, 0.7, 0.6), [4] * 2, 2, seed)
        feed(model, (0.5, 0.25, 0.12, 0.06), [4] * 2, 32, seed)
    assert model.band_survival[band_of(2), 0] == pytest.approx(0.9, abs=0.06)
    assert model.band_survival[band_of(32), 0] == pytest.approx(0.5, abs=0.04)


def test_profile_positions_with_few_rows_are_not_believed():
    model = AcceptanceModel(4, 1)
    model.seed((0.8, 0.6, 0.0, 0.0), (500, 500, 3, 3))
    assert model.acceptance[2] > 0.5


def test_state_survives_json_exactly():
    model, other = AcceptanceModel(7, 6), AcceptanceModel(7, 6)
    feed(model, REAL_SURVIVAL, [3, 5] * 100, 8, seed=9)
    other.restore(json.loads(json.dumps(model.export_state())))
    feed(model, REAL_SURVIVAL, [7] * 50, 8, seed=10)
    feed(other, REAL_SURVIVAL, [7] * 50, 8, seed=10)
    assert model.export_state() == other.export_state()


def test_longer_lengths_can_be_added():
    model = AcceptanceModel(3, 2)
    feed(model, (0.8, 0.6, 0.5), [3] * 100, 2, seed=11)
    before = model.acceptance.copy()
    model.extend(6, 5)
    assert model.acceptance[:3] == pytest.approx(before)
    assert model.expected_tokens.shape == (5, 7)


@pytest.mark.parametrize(("batch", "band"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (32, 5), (33, 6)])
def test_bands_are_the_default_buckets(batch, band):
    assert band_of(batch) == band
