"""Predicted beside observed step times, and what steps at other arms cost."""

import pytest

from speclen.controller.service.prediction import PredictionError
from speclen.records import Arm, Choice, StepFlag, StepRecord, Table

TABLE = Table(1, (Choice(1, 2, Arm(3), 5.0), Choice(3, 4, Arm(2), 10.0)))


def step(batch: int, length: int, latency_s: float, *histogram: int, flagged: bool = False) -> StepRecord:
    flags = frozenset({StepFlag.PREFILL}) if flagged else frozenset()
    return StepRecord(1, batch, Arm(length), latency_s, histogram, flags=flags)


def test_the_prediction_error_is_observed_over_predicted():
    error = PredictionError()
    # 4 sequences, 4 accepted tokens: 2 tokens per sequence, so 20 ms were predicted, and 22 observed.
    error.add(TABLE, [step(4, 2, 0.022, 1, 2, 1), step(4, 2, 9.0, 1, 2, 1, flagged=True)])
    [(sizes, sums)] = error.compared.items()
    assert (sizes, sums.num_steps, sums.observed_s, sums.predicted_s) == ((3, 4), 1, 0.022, 0.020)
    assert (error.elsewhere_s, error.regret_s) == (0.0, 0.0)


def test_tokens_are_expected_of_the_sequences_that_show_theirs():
    error = PredictionError()
    # Two of four sequences, 2 accepted tokens: 2 tokens per sequence.
    error.add(TABLE, [step(4, 2, 0.022, 0, 2, 0)])
    [sums] = error.compared.values()
    assert sums.predicted_s == pytest.approx(0.020)


def test_regret_is_what_the_arm_in_use_would_have_saved():
    error = PredictionError()
    probes = [
        step(4, 1, 0.016, 4, 0),  # one token each: 10 ms were promised
        step(2, 0, 0.004, 2),  # 5 ms were promised: a lucky one
        step(9, 0, 0.030, 9),  # beyond the last range, which holds for it: 10 ms
        step(4, 1, 9.0, 4, 0, flagged=True),
    ]
    error.add(TABLE, probes)
    assert error.elsewhere_s == pytest.approx(0.050)
    assert error.regret_s == pytest.approx(0.006 - 0.001 + 0.020)


def test_nothing_is_said_where_nothing_was_predicted():
    error = PredictionError()
    error.add(Table(1, (Choice(1, 4, Arm(2)),)), [step(4, 2, 0.022, 1, 2, 1)])
    assert (error.compared, error.elsewhere_s) == ({}, 0.0)
