"""The law: every policy speaks through the same few calls, and does what its source says."""

import numpy as np
import pytest

from speclen.controller.estimator.buckets import buckets_for
from speclen.controller.estimator.core import Limits, StepObservation
from speclen.controller.estimator.policies import POLICIES, is_policy, make_policy
from speclen.controller.estimator.policies.policy import Space
from tests.steps_of import LIMITS, Steps, profile_of

COMPARISONS = sorted(POLICIES)


def space(limits=LIMITS) -> Space:
    return Space(limits, buckets_for("doubling", limits.max_batch_size))


def play(policy, steps, batch, bucket, count):
    """Ask, decode, report, count times; returns the lengths."""
    played = []
    for _ in range(count):
        played.append(policy.pull(bucket))
        policy.update(np.array([bucket]), [steps.step(batch, played[-1])])
    return played


@pytest.mark.parametrize("name", [*COMPARISONS, "fixed:3"])
def test_choices_are_lengths_that_exist(name):
    policy = make_policy(name, space(), seed=1)
    policy.seed(profile_of(Steps(1)))
    assert all(0 <= length <= 8 for length in play(policy, Steps(1), 4, 2, 60))
    assert len(policy.pull_all()) == 6
    none = make_policy(name, space(Limits(4, 0)))
    assert none.pull_all() == [0, 0, 0]


@pytest.mark.parametrize("name", ["ucb1", "thompson", "bin-greedy", "ucbspec", "exp3spec"])
def test_bandits_come_to_prefer_the_better_length(name):
    """Length 4 gives five times the goodput of all others: it must get the largest share of 1,500 steps."""
    steps = Steps(2, acceptance=0.8)
    steps.time = lambda batch, length: 0.02 if length == 4 else 0.1
    played = play(make_policy(name, space(), seed=2), steps, 4, 2, 1500)
    counts = np.bincount(played[500:], minlength=9)
    assert counts.argmax() == 4
    assert counts[4] > 0.3 * counts.sum()


def test_the_profile_policy_is_the_papers_table_and_never_moves():
    steps = Steps(3)
    policy = make_policy("profile", space())
    assert policy.pull_all() == [2] * 6
    policy.seed(profile_of(steps))
    table = policy.pull_all()
    assert table[0] == steps.best(1)
    steps.acceptance = 0.1
    play(policy, steps, 1, 0, 50)
    assert policy.pull_all() == table


def test_ema_moves_between_its_tiers():
    policy = make_policy("ema", space())
    assert policy.pull(2) == 3
    play(policy, Steps(4, acceptance=0.97), 4, 2, 80)
    assert policy.pull(2) == 7
    play(policy, Steps(5, acceptance=0.02), 4, 2, 80)
    assert policy.pull(2) == 1
    assert policy.pull(0) == 3  # buckets by themselves


def test_throughput_aware_follows_acceptance_but_not_time():
    steps = Steps(6, acceptance=0.75)
    policy = make_policy("throughput-aware", space())
    policy.seed(profile_of(steps))
    play(policy, steps, 4, 2, 250)
    before = policy.pull(2)
    steps.time = lambda batch, length: 0.01 + 0.05 * length
    play(policy, steps, 4, 2, 250)
    assert policy.pull(2) == pytest.approx(before, abs=1)
    steps.acceptance = 0.05
    play(policy, steps, 4, 2, 250)
    assert policy.pull(2) <= 1


def test_bin_greedy_keeps_a_length_for_a_whole_bin():
    played = play(make_policy("bin-greedy", space(), seed=7), Steps(7), 4, 2, 1 + 4 + 16 + 64)
    last_block = played[21:]
    assert all(len(set(last_block[start : start + 8])) == 1 for start in range(0, 64, 8))


def test_banditspec_neither_knows_batch_size_nor_zero():
    for name in ("ucbspec", "exp3spec"):
        policy = make_policy(name, space(), seed=8)
        assert 0 not in play(policy, Steps(8), 32, 5, 300)
    policy = make_policy("ucbspec", space())
    play(policy, Steps(9), 1, 0, 100)
    assert len(set(policy.pull_all())) == 1


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_policy_follows_to_larger_limits(name):
    small = space(Limits(4, 3))
    policy = make_policy(name, small, seed=10)
    play(policy, Steps(10), 2, 1, 20)
    small.limits, small.buckets = Limits(32, 6), buckets_for("doubling", 32)
    policy.extend()
    assert len(policy.pull_all()) == 6
    assert all(length <= 6 for length in play(policy, Steps(11), 30, 5, 20))


def test_names():
    assert is_policy("fixed:0")
    assert is_policy("fixed:64")
    assert not is_policy("fixed:65")
    assert not is_policy("fixed:")
    assert not is_policy("fixed:-1")
    for name in ("fixed:x", "", "Adaptive"):
        with pytest.raises(ValueError, match="unknown"):
            make_policy(name, space())


def test_a_step_counts_the_bonus_token_for_every_row():
    from speclen.controller.estimator.policies.cells import tokens_per_row

    assert tokens_per_row(StepObservation(4, 2, 0.01, (1, 1, 2))) == 1.0 + 5.0 / 4.0
