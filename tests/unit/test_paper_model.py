"""The paper's model, fitted to step times that follow it exactly, gives its constants back; and its optimum is one."""

from __future__ import annotations

import itertools

import pytest

from speclen.cli.profile.paper_model import PaperModel, fit
from speclen.records import ProfileCell

C, GAMMA, BETA = 0.8, 0.55, 0.020
SLOPE = {1: 0.0011, 8: 0.0026, 32: 0.0110}


def accepted_increments(longest: int) -> list[float]:
    """Survival whose running sum is C * s**GAMMA."""
    totals = [C * s**GAMMA for s in range(longest + 1)]
    return [b - a for a, b in itertools.pairwise(totals)]


def exact_cells() -> list[ProfileCell]:
    return [ProfileCell(b, s, BETA + slope * s) for b, slope in SLOPE.items() for s in range(9)]


def test_constants_of_an_exact_profile_are_found() -> None:
    model = fit(exact_cells(), accepted_increments(8))
    assert (model.c, model.gamma, model.beta_s) == pytest.approx((C, GAMMA, BETA))
    assert model.slope_s == pytest.approx(SLOPE)
    assert model.step_error < 1e-9
    assert model.accepted_error < 1e-9


@pytest.mark.parametrize("batch_size", SLOPE)
def test_the_optimum_solves_the_papers_equation_and_beats_its_neighbours(batch_size: int) -> None:
    model = fit(exact_cells(), accepted_increments(8))
    s, slope = model.optimum(batch_size), SLOPE[batch_size]
    equation = slope * C * (1 - GAMMA) * s**GAMMA - BETA * C * GAMMA * s ** (GAMMA - 1) + slope
    assert equation == pytest.approx(0, abs=1e-7)
    assert model.s_per_token(batch_size, s) < model.s_per_token(batch_size, s * 1.1)
    assert model.s_per_token(batch_size, s) < model.s_per_token(batch_size, s * 0.9)


def test_the_best_length_falls_as_the_batch_grows() -> None:
    model = fit(exact_cells(), accepted_increments(8))
    best = [model.best_length(b, 8) for b in sorted(SLOPE)]
    assert best == sorted(best, reverse=True)
    assert best[0] > best[-1]


def test_when_a_draft_token_costs_more_than_it_saves_the_best_length_is_zero() -> None:
    model = PaperModel(0.3, 0.5, 0.01, {16: 0.02}, 0.0, 0.0)
    assert model.best_length(16, 8) == 0


def test_profiles_that_determine_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="survival at two lengths"):
        fit(exact_cells(), [0.6])
    with pytest.raises(ValueError, match="accepted"):
        fit(exact_cells(), [0.0, 0.0])
    with pytest.raises(ValueError, match="step times at two lengths"):
        fit([ProfileCell(1, 3, 0.1), ProfileCell(2, 3, 0.1)], [0.5, 0.2])
