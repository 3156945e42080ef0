"""From steps to cells: pauses do not move a mean, context length does not pose as cost of a length, runs are censored."""

from __future__ import annotations

import numpy as np
import pytest

from speclen.worker.profiling.stats import (
    context_slope,
    expected_tokens_error,
    measured_cells,
    reference_context,
    robust_mean,
    survival,
)


def test_pauses_of_the_machine_do_not_move_the_mean() -> None:
    """Steps stalled 10 to 100 times when another process took the core of a waiting thread."""
    rng = np.random.default_rng(0)
    values = 0.030 * (1 + 0.03 * rng.standard_normal(40))
    with_pauses = np.concatenate([values, [0.3, 3.0, 0.9]])
    mean, stderr, outliers = robust_mean(with_pauses, np.arange(43))
    assert outliers == 3
    assert mean == pytest.approx(values.mean(), rel=1e-9)
    assert stderr == pytest.approx(values.std(ddof=1) / np.sqrt(40), rel=1e-9)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """400 cells of 12 steps: 1.96 standard errors (normal, not t) cover about 92%; 360 of 400 has odds below 1e-1
    to be missed at 92% and none to be reached at 80%."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        mean, stderr, _ = robust_mean(0.02 * np.exp(0.08 * rng.standard_normal(12)), np.arange(12))
        covered += abs(mean - 0.02 * np.exp(0.0032)) <= 1.96 * stderr
    assert 350 <= covered <= 396


def test_steps_of_one_visit_do_not_make_each_other_certain() -> None:
    """400 cells of 12 visits of 3 steps, whose moment of the machine they share: 8% of it, 2% of their own. Taken for
    36 steps on their own, the intervals cover two thirds of what they say."""
    rng, covered, alone = np.random.default_rng(2), 0, 0
    visits = np.repeat(np.arange(12), 3)
    for _ in range(400):
        values = 0.02 * (1 + 0.08 * np.repeat(rng.standard_normal(12), 3) + 0.02 * rng.standard_normal(36))
        mean, stderr, _ = robust_mean(values, visits)
        covered += abs(mean - 0.02) <= 1.96 * stderr
        alone += abs(mean - 0.02) <= 1.96 * robust_mean(values, np.arange(36))[1]
    assert covered >= 350
    assert alone < 320


def samples_with_context(slope: float, seed: int = 0) -> dict[tuple[int, int], np.ndarray]:
    """Cells whose contexts happen to differ: the longer length was measured on longer rows."""
    rng = np.random.default_rng(seed)
    samples = {}
    for batch_size in (1, 4, 16):
        for length in (0, 4):
            contexts = rng.uniform(50, 400, 30) + 300 * (length == 4)
            latency = 0.010 + 0.001 * length + slope * batch_size * contexts
            samples[batch_size, length] = np.stack(
                [latency * (1 + 0.01 * rng.standard_normal(30)), contexts, np.arange(30)], axis=1
            )
    return samples


def test_context_length_does_not_pose_as_cost_of_speculation() -> None:
    slope = 2e-6
    samples = samples_with_context(slope)
    samples[4, 0][3, 0] = 5.0  # a pause
    found = context_slope(samples)
    assert found == pytest.approx(slope, rel=0.1)
    cells = {(c.batch_size, c.speculation_length): c for c in measured_cells(samples, found, 300.0)}
    for batch_size in (1, 4, 16):
        for length in (0, 4):
            truth = 0.010 + 0.001 * length + slope * batch_size * 300
            assert cells[batch_size, length].step_s == pytest.approx(truth, rel=0.03)
    assert cells[4, 0].num_outliers == 1
    assert reference_context(samples) == pytest.approx(375, abs=30)


def test_survival_counts_a_full_run_as_censored() -> None:
    """Ten rows at length 1, all accepted, say nothing of position 2; ten at length 2 do."""
    values, rows = survival({1: [0, 10], 2: [5, 3, 2]})
    assert rows == [20, 5]
    assert values == pytest.approx([15 / 20, 15 / 20 * 2 / 5])


def test_survival_of_geometric_drafts_is_found_from_mixed_lengths() -> None:
    """20,000 rows: the standard error of survival[3] is below 0.004; 0.02 is 5 of them."""
    rng = np.random.default_rng(2)
    histograms = {}
    for length in (1, 2, 4):
        runs = np.minimum(rng.geometric(0.4, 20_000) - 1, length)
        histograms[length] = np.bincount(runs, minlength=length + 1).tolist()
    values, _ = survival(histograms)
    assert values == pytest.approx([0.6, 0.36, 0.216, 0.1296], abs=0.02)
    assert values == sorted(values, reverse=True)


def test_survival_without_speculation_is_empty_and_without_rows_zero() -> None:
    assert survival({}) == ([], [])
    assert survival({0: [50]}) == ([], [])
    assert survival({3: [4, 0, 0, 0]}) == ([0.0, 0.0, 0.0], [4, 0, 0])


def test_the_error_of_expected_tokens_is_that_of_a_mean() -> None:
    """100 rows, half of them with 1 token and half with 3: mean 2, deviation 1.005, half interval 0.197."""
    assert expected_tokens_error([50, 0, 50]) == pytest.approx(1.96 * 1.00504 / 10 / 2, rel=1e-4)
    assert expected_tokens_error([]) == expected_tokens_error([1]) == float("inf")
