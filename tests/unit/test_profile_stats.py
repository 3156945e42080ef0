"""From steps to cells: pauses do not move a time, steps of one visit are one sample, runs are censored."""

from __future__ import annotations

import numpy as np
import pytest

from speclen.worker.profiling.stats import measured_cell, survival


def test_pauses_of_the_machine_do_not_move_the_time() -> None:
    """Every fourth step stalled 10 to 100 times when another process took the core of a waiting thread."""
    rng = np.random.default_rng(0)
    steps = [(0.03 * (1 + 0.03 * rng.standard_normal()) * (30 if n % 4 == 0 else 1), 50.0, n // 3) for n in range(60)]
    cell = measured_cell((4, 2), steps)
    assert cell[:2] == (4, 2)
    assert cell.step_s == pytest.approx(0.03, rel=0.03)
    assert 0 < cell.step_s_stderr < 0.03 * 0.05
    assert (cell.num_steps, cell.mean_context_length) == (60, 50.0)


@pytest.mark.parametrize("num_visits", [1, 2])
def test_few_visits_are_taken_for_uncertain(num_visits: int) -> None:
    cell = measured_cell((1, 0), [(0.01, 50.0, visit) for visit in range(num_visits)])
    assert cell.step_s == 0.01
    assert cell.step_s_stderr >= 0.0005


def test_survival_counts_a_full_run_as_censored() -> None:
    """Ten rows at length 1, all accepted, say nothing of position 2; ten at length 2 do."""
    values, rows = survival({1: [0, 10], 2: [5, 3, 2]})
    assert rows == [20, 5]
    assert values == pytest.approx([15 / 20, 15 / 20 * 2 / 5])


def test_survival_without_speculation_is_empty_and_without_rows_zero() -> None:
    assert survival({}) == ([], [])
    assert survival({0: [50]}) == ([], [])
    assert survival({3: [4, 0, 0, 0]}) == ([0.0, 0.0, 0.0], [4, 0, 0])
