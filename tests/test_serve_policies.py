"""Policies by name, the tables that they are made of, and other people's rules."""

import json

import pytest

from speclen.bench.serving.load import Yield
from speclen.bench.serving.policies import expand, fitted_table, in_words, make_policy, parse_policies, stretched
from speclen.bench.serving.rules import EVERY_STEPS, ThroughputAware
from speclen.bench.serving.survey import Survey
from speclen.console.errors import UserError
from speclen.worker.drafting.plan import PLAIN, Plan
from speclen.worker.engine.length_chooser import LengthChoice, StepResult

SIZES, LENGTHS = (1, 4), (0, 1, 2, 3)


@pytest.fixture
def profile(tmp_path):
    """A step takes 10 ms and 1 ms a draft token at batch size 1, 10 ms a token at 4; survival 0.8, 0.6, 0.4."""
    cells = [
        {"batch_size": b, "speculation_length": s, "step_s": 0.01 + s * (0.001 if b == 1 else 0.01), "num_steps": 9}
        for b in SIZES
        for s in LENGTHS
    ]
    context = {"target": "t", "draft": "d", "device": "cpu", "dtype": "float32", "engine_fingerprint": "x"}
    content = {
        "format": "speclen-profile",
        "version": 1,
        "context": context,
        "measured_at": "2026-01-01",
        "source": "test",
    }
    content |= {"cells": cells, "survival": [0.8, 0.6, 0.4], "num_survival_rows": [9, 9, 9], "as_prior": False}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_names_are_spelled_out():
    assert parse_policies("adaptive, fixed:0-2,copy", 8) == ["adaptive", "none", "fixed:1", "fixed:2", "copy"]
    assert expand("fixed:3") == ["fixed:3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no policy"),
        ("greedy", "'greedy'"),
        ("fixed:9", "fixed:0 to fixed:8"),
        ("none,fixed:0-3", "none twice"),
    ],
)
def test_what_is_no_policy_is_named(text, words):
    with pytest.raises(UserError, match=words):
        parse_policies(text, 8)


def test_tables_of_every_kind(profile):
    survey = Survey()
    for key, rate in {
        (1, "plain"): 1,
        (1, "draft 3"): 9,
        (4, "plain"): 5,
        (4, "draft 3"): 4,
        (4, "copy>=3 up to 8"): 6,
    }.items():
        survey.add(key, Yield(rate, 1.0, 1.0))

    def table(name):
        return in_words(make_policy(name, 4, 3, profile, survey).table)

    assert table("none") == [(1, 4, "plain")]
    assert table("fixed:2") == [(1, 4, "draft 2")]
    assert table("copy") == [(1, 4, "copy>=3 up to 8")]
    assert table("oracle") == [(1, 1, "draft 3"), (2, 4, "plain")]
    assert table("oracle-plans") == [(1, 1, "draft 3"), (2, 4, "copy>=3 up to 8")]
    # 13 ms for 2.8 tokens at batch size 1; at 4, 10 ms a token is more than any position is accepted.
    assert table("profile") == [(1, 1, "draft 3"), (2, 4, "plain")]
    assert len(fitted_table(profile, 4, 3)) == 4
    assert make_policy("adaptive", 4, 3, None, survey).learns
    assert table("copy-reporting") == table("copy")
    assert make_policy("copy-reporting", 4, 3, None, survey).learns, "it has a controller"
    assert make_policy("adaptive", 4, 3, None, survey).copies
    lengths = make_policy("adaptive-lengths", 4, 3, None, survey)
    assert (lengths.learns, lengths.copies, lengths.table) == (True, False, None)
    with pytest.raises(UserError, match="paper needs --profile"):
        make_policy("paper", 4, 3, None, survey)


def test_a_batch_size_between_two_measured_ones_follows_the_larger():
    assert stretched([1, 4], [PLAIN, Plan(2)], 6) == (PLAIN, Plan(2), Plan(2), Plan(2), Plan(2), Plan(2))


def rule():
    costs = {(b, s): 0.01 + s * (0.001 if b == 1 else 0.004) for b in SIZES for s in LENGTHS}
    return ThroughputAware(costs, [0.8, 0.7, 0.65], 3)


def test_throughput_aware_takes_the_length_with_the_most_expected_tokens_a_second():
    """At 1: 1.8/11, 2.5/12, 3.15/13 ms. At 4: 1.8/14, 2.5/18, 3.15/22. Between them costs lie on a line."""
    chooser = rule()
    assert [chooser.choice_for(size).speculation_length for size in (1, 2, 4, 9)] == [3, 3, 3, 3]
    costs = {(4, s): 0.01 + s * 0.008 for s in LENGTHS}
    assert ThroughputAware(costs, [0.5, 0.2, 0.1], 3).choice_for(4).speculation_length == 1


def test_throughput_aware_follows_acceptance_and_never_stops_speculating():
    chooser = rule()
    assert chooser.choice_for(4).speculation_length == 3
    for _ in range(10 * EVERY_STEPS):
        length = chooser.choice_for(4).speculation_length
        chooser.report(LengthChoice(length), StepResult(4, length, 0.02, (4, *[0] * length), 100.0))
    assert chooser.choice_for(4).speculation_length == 1


def test_a_profile_without_a_common_length_is_refused():
    with pytest.raises(ValueError, match="no length"):
        ThroughputAware({(1, 1): 0.1, (4, 2): 0.1}, [0.5], 3)
