"""The estimator finds good arms for simulated workers, at a small cost: public calls alone."""

from __future__ import annotations

import numpy as np
import pytest

from speclen.controller.estimator import Estimators
from speclen.records import Arm, ContextKey, Decision, DriftEvent, Limits, OutputEvaluation, Probe, StepFlag, StepRecord
from tests.support.simulated_worker import GROUP, KEY, LIMITS, SIZES, Worker, made, profile
from tests.support.world import World


@pytest.mark.parametrize("acceptance", [0.3, 0.75])
def test_from_nothing_it_finds_arms_close_to_the_best(acceptance: float) -> None:
    worker = Worker(made(), acceptance=acceptance)
    for number in range(60):
        worker.serve(SIZES[number % 6], 40)
    assert max(map(worker.shortfall, SIZES)) < 0.03


def test_a_very_wrong_profile_is_overcome_while_the_load_moves() -> None:
    """By the profile drafting never pays. The batch size moves before a probe can run at the one it was made for."""
    worker = Worker(made())
    worker.estimator.seed(profile(draft_s=0.06))
    assert worker.shortfall(4) > 0.3, "the profile must be wrong"
    for number in range(60):
        worker.serve((3, 4, 5, 4)[number % 4], GROUP)
    assert worker.shortfall(4) < 0.03
    worker.estimator.seed(profile(draft_s=0.06))
    assert worker.shortfall(4) < 0.03, "it seeds and never overrides"


def test_plain_steps_that_are_faster_than_any_formula_expects_are_found() -> None:
    """As on a CPU that prepares every operation again where n-grams change the number of tokens."""
    estimator, rng = made(limits=Limits(16, 3, ngram=True)), np.random.default_rng(0)
    num_steps, num_drafted = (100, 80, 76, 75, 60, 54, 52, 51), (0, 80, 76, 75, 0, 40, 38, 37)
    evaluation = OutputEvaluation(0, 100, 100, num_steps, num_drafted, (100, 160, 228, 300, 180, 200, 230, 260))
    arms, probe = Limits(16, 3, ngram=True).arms(), None
    for seq in range(900):
        batch_size, probe_id, arm = (8, 0, arms[seq % 8]) if seq < 400 else (16, 0, estimator.table("w").arm_for(16))
        if batch_size == 16 and seq % 10 < 3 and probe is not None:
            probe_id, arm = probe.probe_id, probe.arm
        tokens, passes = batch_size * (3 if arm.ngram else 1 + arm.speculation_length), arm.speculation_length
        step_s = (0.0125 + 0.0001 * tokens + 0.002 * passes) * (0.4 if batch_size == 16 and arm == Arm(0) else 1.0)
        step_s *= float(np.exp(0.05 * rng.standard_normal()))
        step = StepRecord(seq, batch_size, arm, step_s, (batch_size, *(0,) * arm.max_tokens), 100.0, probe_id=probe_id)
        step = step._replace(num_verified_tokens=tokens, num_drafted_sequences=batch_size if passes else 0)
        estimator.observe([step._replace(evaluations=(evaluation,))], "w")
        if seq % 10 == 9:
            probe = estimator.probe("w", batch_size)
    assert estimator.table("w").arm_for(16) == Arm(0)
    assert estimator.table("w").arm_for(8).ngram


def test_arms_that_are_level_do_not_take_turns() -> None:
    """Draft passes that cost what their tokens win: every length has nearly the same goodput."""
    worker = Worker(made(), acceptance=0.6)
    worker.serve(8, 800)
    chosen = set()
    changes = 0
    for _ in range(50):
        changes += sum(
            isinstance(each, Decision) and each.batch_min <= 8 <= each.batch_max for each in worker.serve(8, 40)
        )
        chosen.add(worker.estimator.table().arm_for(8))
    assert changes <= 4, f"{changes} changes among {chosen} in 2,000 steps"


def test_a_slowdown_of_all_arms_alike_does_not_move_the_choice() -> None:
    """Stretches of 40 steps that take 1.7 times as long."""
    worker = Worker(made(), seed=1)
    worker.estimator.seed(profile())
    worker.serve(4, 400)
    shortfalls = []
    for number in range(30):
        worker.slowdown = 1.7 if number % 3 == 2 else 1.0
        worker.serve(4, 40)
        shortfalls.append(worker.shortfall(4))
    assert max(shortfalls) < 0.03


@pytest.mark.parametrize(("acceptance", "draft_s"), [(0.3, 0.0015), (0.75, 0.0015), (0.02, 0.05)])
def test_exploration_spends_about_a_percent_of_the_time_after_the_first_minute(
    acceptance: float, draft_s: float
) -> None:
    """The last is a draft of which every probe costs several steps, so that the budget is what limits them."""
    worker = Worker(made())
    worker.world = World(acceptance, draft_s)
    number, before = 0, (0.0, 0.0)
    while worker.total_s < 150.0:
        worker.serve((1, 4, 12, 30)[number % 4], 40)
        number += 1
        if not before[0] and worker.total_s > 60.0:
            before = worker.total_s, worker.lost_s
    assert worker.lost_s - before[1] < 0.015 * (worker.total_s - before[0])


def test_steps_that_a_probe_makes_longer_are_paid_for() -> None:
    """Catching the draft model up takes as long as ten steps: then there are fewer probes."""

    def with_catch_up(step: StepRecord) -> StepRecord:
        if not step.probe_id:
            return step
        return step._replace(latency_s=10 * step.latency_s, flags=frozenset({StepFlag.CATCH_UP}))

    counts = []
    for distort in (lambda step: step, with_catch_up):
        worker = Worker(made(), acceptance=0.1)
        worker.distort = distort
        counts.append(sum(isinstance(each, Probe) for each in worker.serve(8, 4000)))
    assert 0 < counts[1] < counts[0] / 2


def test_flagged_steps_are_no_samples_of_time() -> None:
    worker = Worker(made())
    worker.distort = lambda step: step._replace(flags=frozenset({StepFlag.PREFILL}))
    worker.serve(4, 40)
    assert not any(row.num_steps for row in worker.estimator.rows())


def test_the_table_expects_the_times_of_each_range() -> None:
    worker = Worker(made())
    worker.serve(4, 40)
    expected = [row.ms_per_token for row in worker.estimator.rows() if row.is_best]
    assert [choice.ms_per_token for choice in worker.estimator.table().choices] == pytest.approx(expected)


def test_devices_learn_apart_from_a_first_guess_of_acceptance() -> None:
    """Verifying a token takes twenty times as long on the large device, and its text is harder."""
    rng, estimators = np.random.default_rng(2), Estimators()
    small, large = (KEY._replace(device=device) for device in ("small", "large"))

    def learn(key: ContextKey, num_steps: int, accepted: float, fixed_s: float, token_s: float) -> tuple[int, float]:
        """The learned length, and the expected tokens of one draft token."""
        estimators.add(key, LIMITS)
        for seq in range(1, num_steps + 1):
            length = seq % 5
            runs = np.minimum(rng.geometric(1.0 - accepted, size=8) - 1, length)
            latency_s = fixed_s + 0.001 * length + 8 * token_s * (length + 1)
            latency_s *= float(np.exp(0.03 * rng.standard_normal()))
            histogram = tuple(np.bincount(runs, minlength=length + 1).tolist())
            step = StepRecord(seq, 8, Arm(length), latency_s, histogram, 100.0)
            estimators[key].observe([step._replace(num_drafted_sequences=8, num_verified_tokens=8 * (length + 1))], "w")
        [tokens] = [row.expected_tokens for row in estimators[key].rows() if row.batch_min == 8 and row.arm == Arm(1)]
        return estimators[key].table().arm_for(8).speculation_length, tokens

    length, tokens = learn(small, 400, 0.9, 0.020, 0.0002)
    assert length >= 3
    assert tokens == pytest.approx(1.9, abs=0.05)
    assert learn(large, 1, 0.3, 0.008, 0.0040)[1] > 1.7, "the usual prior says 1.7"
    assert learn(large, 400, 0.3, 0.008, 0.0040) == (0, pytest.approx(1.3, abs=0.05))
    assert learn(small, 1, 0.9, 0.020, 0.0002)[1] == pytest.approx(1.9, abs=0.05)


def test_outputs_that_change_are_an_event_and_hard_requests_in_a_row_are_not():
    worker = Worker(made())
    events: list[DriftEvent] = []

    def serve(num_steps: int, num_plain_steps: int) -> None:
        """Decode with some outputs evaluated. num_plain_steps: with drafts, there are half as many."""
        drafting = (num_plain_steps // 2,) * 8
        evaluation = OutputEvaluation(0, 60, 60, (num_plain_steps, *drafting), (0, *drafting), (60,) * 9)
        for _ in range(num_steps):
            step = worker.step(4, 3)._replace(evaluations=(evaluation,))
            events.extend(worker.estimator.observe([step], worker.name).drift_events)

    for acceptance in (0.9, 0.3) * 4:
        worker.world = World(acceptance)
        serve(60, 60)
    assert not events
    serve(60, 20)
    assert {event.factor for event in events} == {"acceptance"}


def test_outputs_evaluated_for_n_grams_alone_tell_of_all_arms_with_n_grams():
    estimator, arms = made(limits=Limits(4, 2, ngram=True)), Limits(4, 2, ngram=True).arms()
    whole = OutputEvaluation(
        0, 100, 100, (100, 60, 50, 50, 40, 35), (0, 60, 50, 0, 20, 15), (100, 120, 150, 150, 140, 140)
    )
    alone = OutputEvaluation(0, 100, 100, (100, 80), (0, 0), (100, 200))
    tokens = []
    estimator.observe([StepRecord(0, 2, Arm(0), 0.02, (2,), 100.0, num_verified_tokens=2)], "w")
    assert min(row.expected_tokens for row in estimator.rows()) >= 1, "no step generates less"
    for evaluation in (whole, alone):
        for seq in range(40):
            step = StepRecord(seq, 2, Arm(0), 0.02, (2,), 100.0, evaluations=(evaluation,), num_verified_tokens=2)
            estimator.observe([step], "w")
        of_arm = {row.arm: row.expected_tokens for row in estimator.rows() if row.batch_min == 2}
        tokens.append([of_arm[arm] for arm in arms])
    (plain, one, _, ngram, *_), (later_plain, later_one, _, later_ngram, later_both, _) = tokens
    assert ngram == pytest.approx(2.0, abs=0.1)
    assert later_ngram == pytest.approx(1.54, abs=0.1), "half of the outputs"
    assert later_both < 2.2
    assert (later_plain, later_one) == pytest.approx((plain, one), abs=0.02)
