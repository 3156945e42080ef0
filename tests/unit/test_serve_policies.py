"""Policies of a comparison by name."""

import pytest

from speclen.bench.serving.policies import parse_policies
from speclen.cli.support.errors import UserError
from speclen.worker.config import WorkerConfig


def test_names_are_spelled_out():
    found = parse_policies("adaptive, fixed:0-2,fixed:3,n-gram,n-gram else draft 3", WorkerConfig())
    assert found == ["adaptive", "none", "fixed:1", "fixed:2", "fixed:3", "n-gram", "n-gram else draft 3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no policy"),
        ("greedy", "'greedy'"),
        ("fixed:9", "fixed:9 is over --max-length 8"),
        ("none,fixed:0-3", "none twice"),
        ("profile", "profile needs --profile"),
    ],
)
def test_what_is_no_policy_is_named(text, words):
    with pytest.raises(UserError, match=words):
        parse_policies(text, WorkerConfig())
