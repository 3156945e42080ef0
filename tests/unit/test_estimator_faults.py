"""Faults of the estimator, past and possible: trimmed cells, false alarms, changed text, impossible times, rounding."""

from __future__ import annotations

import numpy as np
import pytest

from speclen.estimator import Arm, Estimator, EstimatorSettings, Limits, OutputEvaluation, StepRecord
from tests.support.world import World

LENGTH, ROWS = 4, 8


def step(batch_size: int, length: int, latency_s: float, histogram=None, **fields) -> StepRecord:
    runs = histogram or (batch_size,) + (0,) * length
    counts = {
        "num_drafted_sequences": batch_size if length else 0,
        "num_verified_tokens": batch_size * (length + 1),
    }
    return StepRecord(1, batch_size, Arm(length), latency_s, runs, **(counts | fields))


def test_cells_are_trimmed_beside_an_isolated_worker() -> None:
    """Three workers at sizes to 256, one with a slow draft: its table once kept places of cells that were gone."""
    estimator, rng = Estimator(EstimatorSettings(max_cells=40), Limits(256, 6)), np.random.default_rng(0)
    worlds = {"a": World(), "b": World(), "slow": World(draft_s=0.03)}
    was_isolated = False
    for number in range(150):
        for name, world in worlds.items():
            sizes = (number * 7 % 60 + 1, 8, 8, 16, 16, 32, 4, number % 250 + 1)
            drawn = [(size, number * at % 7) for at, size in enumerate(sizes)]
            records = [step(size, length, *world.draw(size, length, rng)) for size, length in drawn]
            estimator.observe(records, name)
        was_isolated |= estimator.is_isolated("slow")
    assert was_isolated
    assert not estimator.is_isolated("a")
    assert len(estimator.rows()) > 0


def alarms(acceptances, rng: np.random.Generator, estimator: Estimator, num_steps: int) -> list[int]:
    """Steps at which a change of the text was noticed. Requests have 60 to 300 steps and an acceptance of their own."""
    left, own, found = np.zeros(ROWS, int), np.zeros(ROWS), []
    for group in range(num_steps // 32):
        records = []
        for _ in range(32):
            new = left == 0
            left[new], own[new] = rng.integers(60, 301, new.sum()), acceptances(new.sum())
            left -= 1
            runs = np.minimum(np.floor(np.log(rng.random(ROWS)) / np.log(own)), LENGTH).astype(int)
            histogram = tuple(np.bincount(runs, minlength=LENGTH + 1).tolist())
            records.append(step(ROWS, LENGTH, 0.02, histogram, num_new_sequences=int(new.sum())))
        events = estimator.observe(records).drift_events
        found += [32 * (group + 1)] * bool(events)
    return found


@pytest.mark.parametrize("seed", range(2))
def test_constant_text_is_no_change(seed: int) -> None:
    """Requests of 60 to 300 alike steps, easy and hard ones: 10,000 steps of eight."""
    rng = np.random.default_rng(seed)

    def acceptances(number: int) -> np.ndarray:
        return np.where(rng.random(number) < 0.6, 0.85, 0.54) + 0.04 * rng.standard_normal(number)

    assert alarms(acceptances, rng, Estimator(limits=Limits(ROWS, LENGTH)), 10_000) == []


def test_n_grams_that_stop_paying_are_noticed_within_five_seconds() -> None:
    """Steps a token from 0.33 to 1.0. At 30 steps a second, five seconds are 150 steps."""
    limits = Limits(ROWS, 3, ngram=True)
    estimator, arms = Estimator(limits=limits), limits.arms()

    def serve(num_steps: int, whole: tuple[int, ...]) -> Arm:
        """Requests of 60 tokens whose outputs take these steps with every arm."""
        for seq in range(num_steps):
            arm = estimator.arm_for(ROWS)
            at = arms.index(arm)
            tokens = 60 / whole[at]
            good = round(ROWS * (tokens - 1) / max(arm.max_tokens, 1))
            histogram = (ROWS - good, *[0] * (arm.max_tokens - 1), good) if arm.max_tokens else (ROWS,)
            drafts = tuple(steps * bool(each.speculation_length) for each, steps in zip(arms, whole, strict=True))
            verified = tuple(steps * (1 + each.max_tokens) for each, steps in zip(arms, whole, strict=True))
            ended = seq % max(whole[at] // ROWS, 1) == 0
            output = (OutputEvaluation(0, 60, 60, whole[::4], drafts[::4], verified[::4]),) if ended else ()
            record = step(ROWS, arm.speculation_length, 0.03 + 0.004 * arm.speculation_length, histogram)
            fields = {"arm": arm, "num_new_sequences": int(ended), "evaluations": output}
            estimator.observe([record._replace(**fields)])
        return estimator.arm_for(ROWS)

    assert serve(600, (60, 50, 46, 44, 20, 20, 20, 20)).ngram
    arm = serve(150, (60, 40, 30, 25, 60, 40, 30, 25))
    assert arm.speculation_length, "n-grams alone have nothing left to gain"


def learned_from_length_2(acceptances: tuple[float, float], num_steps: int, rng: np.random.Generator) -> float:
    """Expected tokens of length 5, learned from length 2 and one step of length 5 in 20, over those of whole requests.

    Requests have 150 tokens each, and one of two acceptances. Seven are served at a time.
    """
    estimator, size = Estimator(limits=Limits(8, 5)), 7
    own, left = rng.choice(acceptances, size), np.full(size, 150)
    for group in range(num_steps // 20):
        records = []
        for at in range(20):
            length = 5 if at == group % 20 else 2
            runs = np.minimum(np.floor(np.log(rng.random(size)) / np.log(own)), length).astype(int)
            left -= 1 + runs
            ended = left <= 0
            own[ended], left[ended] = rng.choice(acceptances, ended.sum()), 150
            histogram = tuple(np.bincount(runs, minlength=length + 1).tolist())
            records.append(step(size, length, 0.02, histogram, num_new_sequences=int(ended.sum())))
        estimator.observe(records)
    [row] = [row for row in estimator.rows() if row.arm == Arm(5) and row.batch_min <= size <= row.batch_max]
    truth = 1.0 / np.mean([(1.0 - p) / (1.0 - p**6) for p in acceptances])  # mean steps per token
    return row.expected_tokens / truth


@pytest.mark.parametrize("acceptances", [(0.9, 0.5), (0.75, 0.75)])
def test_drafts_longer_than_those_in_use_are_not_overestimated(acceptances: tuple[float, float]) -> None:
    """Requests whose drafts are rejected take a larger share of the steps with long drafts than with short ones.

    Mean of four runs: 0.98 where requests differ (1.07 without the correction), and 0.93 where they are alike, since their
    spread is assumed, not measured.
    """
    ratios = [learned_from_length_2(acceptances, 4000, np.random.default_rng(seed)) for seed in range(4)]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.08), ratios


def test_times_that_are_impossible_do_not_spoil_later_ones() -> None:
    """A lone worker reports 1e-6 s and 3,600 s, and then honestly."""
    estimator, rng, world = Estimator(limits=Limits(8, 4)), np.random.default_rng(0), World()
    for number in range(40):
        estimator.observe([step(4, at % 3, (1e-6, 3600.0)[(number + at) % 2]) for at in range(8)])
        for row in estimator.rows():
            assert 0 < row.step_s < 1e6
            assert 0 <= row.ms_per_token_low <= row.ms_per_token <= row.ms_per_token_high < 1e12
    for _ in range(100):
        length = estimator.arm_for(4).speculation_length
        probe = estimator.probe()
        lengths = [length] * 5 + [probe.arm.speculation_length if probe else length] * 3
        estimator.observe([step(4, each, *world.draw(4, each, rng)) for each in lengths])
    assert world.shortfall(4, estimator.arm_for(4).speculation_length) < 0.05
    [used] = [row for row in estimator.rows() if row.is_best and row.batch_min == 4]
    assert used.step_s == pytest.approx(world.step_s(4, used.arm.speculation_length), rel=0.05)


def test_no_step_generates_less_than_a_token() -> None:
    """Greedy and sampled requests together: plain decoding once rounded to 1 + 2e-16 steps a token."""
    estimator, rng = Estimator(limits=Limits(16, 4, ngram=True)), np.random.default_rng(1)
    for _ in range(60):
        sizes = rng.integers(1, 6, 3)
        kinds = tuple((kind, (int(size),)) for kind, size in enumerate(sizes))
        batch_size = int(sizes.sum())
        estimator.observe([step(batch_size, 0, 0.02, (batch_size,), class_histograms=kinds)])
    assert min(row.expected_tokens for row in estimator.rows()) >= 1.0


def test_one_worker_of_many_that_becomes_slow_does_not_cost_the_others_what_they_learned() -> None:
    """Steps of one of eight workers take 20 times as long for a while; its level once emptied the shared evidence."""
    estimator, rng, world = Estimator(limits=Limits(16, 4)), np.random.default_rng(0), World(0.2, 0.006)

    def serve(name: str, slowdown: float) -> None:
        records = []
        for at in range(8):
            size = (2, 4, 8, 16)[at % 4]
            length = at // 4 * 4 if at % 3 else estimator.arm_for(size, name).speculation_length
            latency_s, histogram = world.draw(size, length, rng)
            records.append(step(size, length, slowdown * latency_s, histogram))
        estimator.observe(records, name)

    for number in range(400):
        serve(f"worker-{number % 8}", 1.0)
    before = [estimator.arm_for(size) for size in (2, 4, 8, 16)]
    for _ in range(8):
        serve("worker-0", 20.0)
    assert [estimator.arm_for(size) for size in (2, 4, 8, 16)] == before


def test_drafts_that_leave_n_grams_nothing_to_gain_do_not_spoil_what_n_grams_gain() -> None:
    """Seven tokens a step are expected of eight drafts, and 4 are seen: that is no loss through n-grams."""
    estimator, rng, arm = Estimator(limits=Limits(8, 8, ngram=True)), np.random.default_rng(0), Arm(8, ngram=True)
    estimator.guess([0.95**position for position in range(1, 9)], 1e6)
    for _ in range(100):
        runs = np.minimum(rng.geometric(0.2, size=(16, 4)) - 1, 8)
        histograms = [tuple(np.bincount(row, minlength=9).tolist()) for row in runs]
        estimator.observe([step(4, 8, 0.04, histogram)._replace(arm=arm) for histogram in histograms])
    of_arm = {row.arm: row.expected_tokens for row in estimator.rows() if row.batch_min == 4}
    assert of_arm[Arm(3, ngram=True)] > 3.0


def test_a_wrong_first_guess_of_acceptance_is_no_change_of_the_text() -> None:
    """A third is accepted where 0.7 was guessed: large batches once alarmed at the first reports."""
    estimator, rng = Estimator(limits=Limits(256, 4)), np.random.default_rng(0)
    for number in range(20):
        records = []
        for at in range(8):
            runs = np.minimum(rng.geometric(0.7, size=256) - 1, 4)
            histogram = tuple(np.bincount(runs, minlength=5).tolist())
            records.append(step(256, 4, 0.1, histogram, num_new_sequences=256 * (number == at == 0)))
        assert estimator.observe(records).drift_events == []
