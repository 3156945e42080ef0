"""Plans in words and back, and what a worker's limits leave of them."""

from __future__ import annotations

import pytest

from speclen.worker.drafting.plan import Plan, PlannedBucket, parse_plan, parse_plans

PLANS = {
    "plain": Plan(),
    "draft 3": Plan(3),
    "copy>=2 up to 8": Plan(0, 2, 8),
    "copy>=3 up to 8, else draft 2": Plan(2, 3, 8),
    "copy>=16 up to 64, and draft 64": Plan(64, 16, 64, True),
}


@pytest.mark.parametrize(("words", "plan"), PLANS.items())
def test_words_are_read_as_they_are_written(words: str, plan: Plan) -> None:
    assert str(plan) == words
    assert parse_plan(words) == plan


def test_other_spellings_mean_the_same() -> None:
    assert parse_plan(" copy ≥ 3 up to 8 ,else draft 2 ") == PLANS["copy>=3 up to 8, else draft 2"]
    assert parse_plan("draft 0") == parse_plan("plain")
    assert parse_plan("copy>=2 up to 8, else draft 0") == PLANS["copy>=2 up to 8"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "''"),
        ("copy", "'copy'"),
        ("copy>=3", "'copy>=3'"),
        ("draft two", "'draft two'"),
        ("draft 65", "65"),
        ("copy>=17 up to 8", "17"),
        ("copy>=1 up to 65", "65"),
        ("copy>=0 up to 8", "copy>=0"),
        ("copy>=2 up to 0", "up to 0"),
        ("draft 2, else copy>=2 up to 8", "else copy"),
    ],
)
def test_what_is_no_plan_is_named(words: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"plan") as error:
        parse_plan(words)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_half_a_plan_is_refused() -> None:
    for parts in ((0, 2, 0), (0, 0, 8), (0, 2, 8, True), (2, 0, 0, True), (-1,), (0, -1, 8)):
        with pytest.raises(ValueError, match="a plan"):
            Plan(*parts)


def test_limits_leave_what_a_worker_can_run() -> None:
    plan = Plan(5, 3, 16, True)
    assert plan.within(8, 16) == plan
    assert plan.within(4, 8) == Plan(4, 3, 8, True)
    assert plan.within(0, 8) == Plan(0, 3, 8)  # no draft model
    assert plan.within(4, 0) == Plan(4)  # no copying
    assert plan.max_tokens == 21
    assert Plan(5, 3, 16).max_tokens == 16


def test_a_plan_for_every_batch_size() -> None:
    assert parse_plans("draft 2", 8) == [PlannedBucket(1, 8, Plan(2))]
    found = parse_plans("1: draft 5; 2-4: copy>=2 up to 8, else draft 3; 5-: plain", 8)
    assert found == [PlannedBucket(1, 1, Plan(5)), PlannedBucket(2, 4, Plan(3, 2, 8)), PlannedBucket(5, 8, Plan())]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1-4: draft 5", "batch size 5"),
        ("2-: draft 5", "batch size 1"),
        ("1-4: draft 5; 4-: plain", "batch size 4"),
        ("1-4: draft 5; 6-: plain", "batch size 5"),
        ("few: draft 5", "'few'"),
        ("1-: draft", "'draft'"),
    ],
)
def test_a_table_of_plans_with_gaps_is_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError, match="plan") as error:
        parse_plans(text, 8)
    assert named in str(error.value)
