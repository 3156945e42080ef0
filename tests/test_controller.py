"""The law: the same calls give the same decisions, tables hold what is believed best, and every change has its reason."""

import json
import math

import pytest

from speclen.controller.estimator.core import ContextKey, Limits, Profile, ProfileCell, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.policies import POLICIES
from tests.steps_of import KEY, LIMITS, Steps, controller_for, profile_of, serve, step_time


def test_from_nothing_it_finds_lengths_close_to_the_best():
    controller, steps = controller_for(), Steps(1)
    for _ in range(12):
        for batch in (1, 6, 12, 32):
            serve(controller, steps, batch, 16)
    for batch in (1, 6, 12, 32):
        chosen = controller.length_for(KEY, batch)
        assert steps.goodput(batch, chosen) >= 0.97 * steps.goodput(batch, steps.best(batch))


def test_acceptance_stays_while_the_right_action_flips_with_the_batch():
    """Drafting pays 23% at batch 1 and costs 16% at a large batch: the table must say 0 there, and not at 1."""
    controller, steps = controller_for(), Steps(2, acceptance=0.5)
    steps.time = lambda batch, length: 0.004 * length + 0.010 * max(1.0, batch * (length + 1) / 16.0)
    for _ in range(15):
        for batch in (1, 4, 32):
            serve(controller, steps, batch, 16)
    assert controller.length_for(KEY, 1) > 0
    assert controller.length_for(KEY, 32) == 0


def test_rows_decide_not_rows_that_were_drafted_for():
    """Yield is counted per row of the batch: a step in which no row accepted anything still gave each row one token."""
    controller = controller_for()
    controller.observe(KEY, [StepObservation(4, 2, 0.03, (4, 0, 0)) for _ in range(50)])
    assert controller.learned_rows(KEY)[2].estimate.expected_tokens < 1.3


def test_tables_and_versions():
    controller, steps = controller_for(), Steps(3)
    table = controller.table(KEY)
    assert [(choice.bucket.batch_min, choice.bucket.batch_max) for choice in table.choices] == [
        (size, size) for size in range(1, 33)
    ]
    assert all(choice.ms_per_token is None for choice in table.choices)
    outcome = controller.observe(KEY, [steps.step(1, 2) for _ in range(30)])
    newer = controller.table(KEY)
    assert newer.version > table.version
    assert {decision.version for decision in outcome.decisions} == {newer.version}
    assert newer.length_for(1) == controller.length_for(KEY, 1)
    for decision in outcome.decisions:
        assert decision.ms_per_token < decision.previous_ms_per_token
        assert str(decision.speculation_length) in decision.reason


def test_exploring_does_not_appear_in_the_table():
    controller, steps = controller_for(Steps(4)), Steps(4)
    table = controller.table(KEY)
    probes = []
    for _ in range(200):
        probe = controller.take_probe(KEY, 4)
        if probe is not None:
            probes.append(probe)
            assert probe.speculation_length != controller.length_for(KEY, 4)
        version = controller.table(KEY).version
        controller.take_probe(KEY, 4)
        assert controller.table(KEY).version == version
        controller.observe(KEY, [steps.step(4, controller.length_for(KEY, 4)) for _ in range(4)])
    assert probes
    assert len({probe.probe_id for probe in probes}) == len(probes)
    assert table.version <= controller.table(KEY).version


def test_near_ties_do_not_flap():
    """Lengths 3 and 4 within 0.1% of each other, two thousand noisy steps: few changes, however often they would swap."""
    steps = Steps(5, acceptance=0.7)
    tokens = [sum(0.7**i for i in range(length + 1)) for length in range(9)]
    level = {3: 1.0, 4: 1.0005}
    steps.time = lambda batch, length: 0.01 * tokens[length] * level.get(length, 1.1)
    controller = controller_for(steps)
    changes = 0
    for _ in range(500):
        group = [steps.step(8, controller.length_for(KEY, 8)) for _ in range(4)]
        changes += sum(decision.bucket.index == 3 for decision in controller.observe(KEY, group).decisions)
    assert changes <= 20


@pytest.mark.parametrize("policy", [*POLICIES, "fixed:3"])
def test_going_on_from_a_stored_state_is_going_on(policy):
    """Exactly, to the last bit, after JSON; for every policy."""
    steps, controller = Steps(6), controller_for(Steps(6), policy)
    for batch in (1, 5, 20):
        serve(controller, steps, batch, 40)
    state, pair_state = json.loads(
        json.dumps([controller.export_state(KEY), controller.export_pair_state(KEY.pair)], allow_nan=False)
    )
    other = Estimator(policy=policy)
    other.restore(KEY, LIMITS, state, pair_state)
    for batch in (5, 1, 32, 7):
        group = [steps.step(batch, controller.length_for(KEY, batch)) for _ in range(8)]
        assert controller.observe(KEY, group, "a").decisions == other.observe(KEY, group, "a").decisions
        assert controller.take_probe(KEY, batch) == other.take_probe(KEY, batch)
    assert controller.export_state(KEY) == other.export_state(KEY)
    assert controller.export_pair_state(KEY.pair) == other.export_pair_state(KEY.pair)


def test_a_change_of_policy_keeps_what_was_learned():
    steps, controller = Steps(7), controller_for(Steps(7))
    serve(controller, steps, 6, 80)
    other = Estimator(policy="fixed:5")
    other.restore(KEY, LIMITS, controller.export_state(KEY), controller.export_pair_state(KEY.pair))
    assert other.length_for(KEY, 6) == 5
    assert other.survival(KEY) == controller.survival(KEY)


def test_a_state_that_is_none_is_refused():
    with pytest.raises(ValueError, match="not usable"):
        Estimator().restore(KEY, LIMITS, {"buckets": [1, 2, 4, 8, 16, 32]}, None)


def test_a_new_device_starts_with_the_acceptance_of_its_pair():
    steps, controller = Steps(8, acceptance=0.4), controller_for()
    serve(controller, steps, 16, 200)
    elsewhere = ContextKey(KEY.target, KEY.draft, "another device", KEY.dtype)
    controller.add_context(elsewhere, LIMITS)
    assert controller.survival(elsewhere)[0] == pytest.approx(0.4, abs=0.05)
    assert controller.learned_rows(elsewhere) == []  # of its step times nothing is known


def test_another_engine_on_the_same_device_starts_with_its_step_times():
    steps, controller = Steps(9), controller_for(Steps(9))
    serve(controller, steps, 16, 200)
    rebuilt = ContextKey(KEY.target, KEY.draft, KEY.device, KEY.dtype, "newer")
    controller.add_context(rebuilt, LIMITS)
    known, new = controller.learned_rows(KEY)[40].estimate, controller.learned_rows(rebuilt)[40].estimate
    assert new.step_s == pytest.approx(known.step_s, rel=0.2)
    assert new.ms_per_token_high > known.ms_per_token_high  # and is less sure of them


def test_another_engine_starts_with_the_times_of_the_one_that_is_most_alike():
    """Story: those of the youngest, which a short try with one thread had left."""
    steps = Steps(9)
    controller = Estimator()
    keys = [
        ContextKey(*("target", "draft", "device", "float32"), f"torch,threads={at}") for at in ("8,1", "1,1", "8,2")
    ]
    for key, slower in zip(keys[:2], (1.0, 3.0), strict=True):
        controller.add_context(key, LIMITS)
        for _ in range(40):
            group = [steps.step(4, length) for length in (0, 2, 4, 6)]
            controller.observe(key, [step._replace(latency_s=slower * step.latency_s) for step in group], "w")
    controller.add_context(keys[2], LIMITS)
    found = [
        next(row.estimate.step_s for row in controller.learned_rows(key) if row.bucket.batch_max == 4) for key in keys
    ]
    assert found[2] == pytest.approx(found[0], rel=0.2)
    assert found[1] > 2 * found[2]


def test_a_profile_of_more_than_was_learned_replaces_nothing_that_was():
    """Story: it brought larger limits, and with those went all that had been learned; so did the days of a fleet."""
    steps, controller = Steps(10), controller_for()
    for length in (0, 2, 4, 6, 8):
        controller.observe(KEY, [steps.step(4, length) for _ in range(40)])
    slow = Profile(tuple(ProfileCell(size, length, 9.0) for size in (4, 64) for length in (0, 4)), (), ())
    controller.add_context(KEY, Limits(64, 8))
    controller.seed_profile(KEY, slow)
    row = next(row for row in controller.learned_rows(KEY) if row.bucket.batch_max == 4)
    assert row.estimate.step_s == pytest.approx(step_time(4, 0), rel=0.2)


def test_a_worker_with_a_shorter_limit_gets_the_best_length_within_it():
    """Story: it got its limit, where no drafts at all were better than drafts of one token."""
    steps, controller = Steps(11, acceptance=0.8), controller_for()
    steps.time = lambda batch, length: 0.010 if not length else 0.026 + 0.0015 * length
    for _ in range(40):
        controller.observe(KEY, [steps.step(1, length) for length in (0, 1, 2, 4, 6, 8)])
    choice = controller.table(KEY).choices[0]
    assert choice.speculation_length > 3
    assert [choice.length_within(most) for most in range(3)] == [0, 0, 0]
    assert choice.length_within(8) == choice.speculation_length
    fixed = controller_for(policy="fixed:5").table(KEY).choices[0]
    assert fixed.length_within(2) == 2


def test_larger_limits_extend_a_context():
    steps, controller = Steps(10), controller_for(Steps(10))
    serve(controller, steps, 4, 80)
    before = controller.length_for(KEY, 4)
    controller.add_context(KEY, Limits(64, 10))
    assert controller.limits(KEY) == Limits(64, 10)
    assert controller.table(KEY).choices[-1].bucket.batch_max == 64
    assert controller.length_for(KEY, 4) == before
    controller.observe(KEY, [steps.step(60, 10) for _ in range(8)])
    controller.add_context(KEY, Limits(8, 2))  # smaller ones change nothing
    assert controller.limits(KEY) == Limits(64, 10)


def test_a_worker_that_cannot_draft_is_served_too():
    controller = Estimator()
    controller.add_context(KEY, Limits(4, 0))
    controller.observe(KEY, [StepObservation(2, 0, 0.01, (2,)) for _ in range(8)])
    assert controller.length_for(KEY, 2) == 0
    assert controller.take_probe(KEY, 2) is None
    assert controller.survival(KEY) == []


@pytest.mark.parametrize(
    ("observation", "named"),
    [(StepObservation(33, 0, 0.01, (33,)), "batch_size 33"), (StepObservation(1, 9, 0.01, (1, *[0] * 9)), "length 9")],
)
def test_steps_beyond_the_limits_are_refused_by_name(observation, named):
    controller = controller_for()
    with pytest.raises(ValueError, match=named):
        controller.observe(KEY, [observation])
    assert controller.table(KEY).version == 1


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="policy 'best'"):
        Estimator(policy="best")
    with pytest.raises(ValueError, match="buckets '4,2'"):
        Estimator(buckets="4,2")
    with pytest.raises(KeyError):
        Estimator().observe(KEY, [StepObservation(1, 0, 0.01, (1,))])
    controller = controller_for()
    with pytest.raises(ValueError, match="batch_size 64"):
        controller.seed_profile(KEY, Profile((ProfileCell(64, 1, 0.1),), (), ()))


@pytest.mark.parametrize("flag", ["latency", "acceptance"])
def test_steps_that_must_not_teach_do_not(flag):
    """A prefill in the same interval says nothing of latency (it once collapsed a table), mixed lengths nothing at all."""
    controller, steps = controller_for(Steps(11)), Steps(11)
    serve(controller, steps, 8, 100, probes=False)
    before = controller.learned_rows(KEY)
    odd = StepObservation(8, 3, 2.0, (8, 0, 0, 0), 100.0, flag != "latency", False)
    controller.observe(KEY, [odd] * 20)
    after = controller.learned_rows(KEY)
    row = next(
        i for i, each in enumerate(before) if each.bucket.batch_max == 8 and each.estimate.speculation_length == 3
    )
    assert after[row].estimate.expected_tokens == pytest.approx(before[row].estimate.expected_tokens, rel=0.02)
    if flag == "latency":
        assert after[row].estimate.step_s == pytest.approx(before[row].estimate.step_s, rel=0.01)


def test_intervals_hold_the_truth_and_shrink():
    controller, steps = controller_for(Steps(12)), Steps(12)
    serve(controller, steps, 8, 40)
    wide = controller.learned_rows(KEY)
    serve(controller, steps, 8, 800)
    narrow = controller.learned_rows(KEY)
    index = next(i for i, row in enumerate(narrow) if row.bucket.batch_min == 5 and row.is_best)
    estimate = narrow[index].estimate
    truth = 1e3 / steps.goodput(8, estimate.speculation_length)
    assert estimate.ms_per_token_low < truth < estimate.ms_per_token_high
    assert math.log(estimate.ms_per_token_high / estimate.ms_per_token_low) < math.log(
        wide[index].estimate.ms_per_token_high / wide[index].estimate.ms_per_token_low
    )


def test_every_row_says_where_it_comes_from():
    controller, steps = controller_for(Steps(13)), Steps(13)
    controller.observe(KEY, [steps.step(3, 2), steps.step(4, 2), steps.step(8, 4)])
    sources = {
        (row.bucket.batch_max, row.estimate.speculation_length): row.source for row in controller.learned_rows(KEY)
    }
    assert sources[4, 2] == sources[8, 4] == "both"
    assert sources[32, 8] == "profile"
    fresh = controller_for()
    fresh.observe(KEY, [steps.step(8, 2)] * 5)
    sources = {(row.bucket.batch_max, row.estimate.speculation_length): row.source for row in fresh.learned_rows(KEY)}
    assert sources[8, 2] == "online"
    # Never measured: the estimate, and so its source, is that of the cells it was inferred from.
    assert sources[32, 8] == "online"
    assert not any(row.num_steps for row in fresh.learned_rows(KEY) if row.bucket.batch_max == 32)


def test_step_time_of_the_tests_is_flat_then_linear():
    """Guards the tests above: below 60 tokens only drafting costs time."""
    assert step_time(1, 0) == step_time(8, 0)
    assert step_time(32, 3) > step_time(32, 1)
    assert profile_of(Steps(0)).survival[0] == 0.75
