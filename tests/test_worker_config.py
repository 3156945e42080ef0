"""Settings that cannot work are refused by name, and defaults suit the machine."""

import pytest

from speclen.worker.backends.threads import default_threads
from speclen.worker.config import WorkerConfig, parse_policy
from speclen.worker.drafting.plan import COPYING, Plan
from speclen.worker.service.assembly import initial_table, max_copied


@pytest.mark.parametrize(
    ("policy", "expected"), [("adaptive", ("adaptive", None)), ("none", ("none", None)), ("fixed:12", ("fixed", 12))]
)
def test_policies(policy, expected):
    assert parse_policy(policy) == expected


@pytest.mark.parametrize("policy", ["", "fixed", "fixed:", "fixed:-1", "fixed:x", "Adaptive"])
def test_unknown_policies_are_named(policy):
    with pytest.raises(ValueError, match="--policy"):
        parse_policy(policy)


@pytest.mark.parametrize(
    ("num_cores", "num_parameters", "threads"),
    [(1, 10**9, 1), (2, 10**9, 2), (16, 5 * 10**6, 1), (16, 60 * 10**6, 7), (16, 7 * 10**9, 16)],
)
def test_threads_suit_the_model_and_the_cores(num_cores, num_parameters, threads):
    assert default_threads(num_cores, num_parameters) == threads


@pytest.mark.parametrize(
    ("policy", "lengths", "follows"), [("adaptive", {2}, True), ("none", {0}, False), ("fixed:5", {5}, False)]
)
def test_the_first_table_is_the_policys(policy, lengths, follows):
    table, follow = initial_table(WorkerConfig(policy=policy, max_batch_size=4), max_length=8)
    assert (set(table.lengths[1:]), follow) == (lengths, follows)


@pytest.mark.parametrize(
    ("settings", "plans", "follows"),
    [
        ({"plan": "copy>=2 up to 8, else draft 3"}, {Plan(3, 2, 8)}, False),
        ({"plan": "1: draft 5; 2-: plain"}, {Plan(5), Plan()}, False),
        ({"policy": "copy"}, {COPYING}, False),
        ({"draft": ""}, {COPYING}, True),
        ({"draft": "none"}, {COPYING}, True),
        ({"draft": "", "policy": "none"}, {Plan()}, False),
    ],
)
def test_the_first_table_may_be_of_plans(settings, plans, follows):
    config = WorkerConfig(**settings, max_batch_size=4)
    table, follow = initial_table(config, max_length=8 if config.has_draft else 0)
    assert (set(table.plans[1:]), follow) == (plans, follows)
    planned = max(plan.copy_max_tokens for plan in plans)
    assert max_copied(config) == (config.max_copied_tokens if follows else planned), "a controller may plan more"


def test_a_fixed_length_over_the_limit_is_refused():
    with pytest.raises(ValueError, match="fixed:5 is over --max-length 4"):
        initial_table(WorkerConfig(policy="fixed:5"), max_length=4)


def test_a_profile_is_read_and_used(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(
        '{"cells": [{"batch_size": 1, "speculation_length": 0, "step_s": 0.01},'
        ' {"batch_size": 1, "speculation_length": 1, "step_s": 0.011}], "survival": [0.8]}'
    )
    table, follow = initial_table(WorkerConfig(policy="profile", profile=profile, max_batch_size=4), max_length=8)
    assert (table.lengths[1:], follow) == ((1, 1, 1, 1), False)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"cells": [{}], "survival": []}', '{"cells": [], "survival": [1]}']
)
def test_a_file_that_is_no_profile_is_named(tmp_path, content):
    profile = tmp_path / "profile.json"
    profile.write_text(content)
    with pytest.raises(ValueError, match="profile"):
        initial_table(WorkerConfig(profile=profile), max_length=8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "fixed:9"}, "fixed:9 is over --max-length 8"),
        ({"policy": "profile"}, "--policy profile needs --profile FILE"),
        ({"plan": "draft 9"}, "--plan 'draft 9' drafts 9 tokens, over --max-length 8: raise that, or draft less"),
        ({"plan": "copy>=2 up to 99"}, "--plan: a plan copies up to 99 tokens; it must be 1 to 64"),
        (
            {"plan": "1-4: draft 2", "max_batch_size": 8},
            "--plan: no plan for batch size 5; the worker has up to 8 rows",
        ),
        ({"plan": "draft 2", "draft": ""}, "--plan 'draft 2' drafts 2 tokens: give a --draft, or a plan that copies"),
        (
            {"plan": "plain", "policy": "none"},
            "--plan 'plain' and --policy none say different things: give one of them",
        ),
        ({"max_kv_tokens": 10}, "--max-kv-tokens is 10; it must be 0, for as many as fit, or at least 256"),
    ],
)
def test_what_cannot_work_is_told_before_torch_is_imported(settings, words):
    with pytest.raises(ValueError, match=words):
        WorkerConfig(**settings)
