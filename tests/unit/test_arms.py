"""Arms by batch size in words."""

from __future__ import annotations

import pytest

from speclen.records import PLAIN, Arm, Choice
from speclen.worker.drafting.arms import parse_arms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", [(1, 8, PLAIN)]),
        ("n-gram else draft 3", [(1, 8, Arm(3, True))]),
        ("1-4: n-gram else draft 5; 5-: draft 1", [(1, 4, Arm(5, True)), (5, 8, Arm(1))]),
        ("1: draft 5 ; 2-7 : n-gram;8-:plain", [(1, 1, Arm(5)), (2, 7, Arm(0, True)), (8, 8, PLAIN)]),
        ("1-100: draft 2", [(1, 100, Arm(2))]),
    ],
)
def test_arms_are_read(text: str, expected: list[tuple[int, int, Arm]]) -> None:
    assert parse_arms(text, 8) == tuple(Choice(*each) for each in expected)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("copy>=3 up to 8", "copy>=3"),
        ("draft 65", "draft 65"),
        ("1-4: draft 5", "batch size 5"),
        ("2-: draft 5", "'2-'"),
        ("1-4: draft 5; 6-: plain", "6-"),
        ("1-4: draft 5; 3-: plain", "3-"),
        ("4-1: draft 5; 2-: plain", "4-1"),
        ("x: draft 5", "'x'"),
        ("1-: draft 5; plain", "plain"),
    ],
)
def test_arms_that_cannot_be_read_are_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"arm|batch size") as error:
        parse_arms(text, 8)
    assert named in str(error.value)
