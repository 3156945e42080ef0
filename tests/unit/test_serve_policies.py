"""Policies by name, and the arm of each at every batch size."""

import json

import pytest

from speclen.bench.serving.policies import expand, in_words, make_table, parse_policies
from speclen.cli.support.errors import UserError

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
    assert parse_policies("adaptive, fixed:0-2,n-gram", 8) == ["adaptive", "none", "fixed:1", "fixed:2", "n-gram"]
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
    def table(name):
        return in_words(make_table(name, 4, 3, profile))

    assert table("none") == [(1, 4, "plain")]
    assert table("fixed:2") == [(1, 4, "draft 2")]
    assert table("n-gram") == [(1, 4, "n-gram")]
    assert table("n-gram else draft 3") == [(1, 4, "n-gram else draft 3")]
    # 13 ms for 2.8 tokens at batch size 1; at 4, 10 ms a token is more than any position is accepted.
    assert table("profile") == [(1, 1, "draft 3"), (2, 4, "plain")]
    assert make_table("adaptive", 4, 3, None) is None
    with pytest.raises(UserError, match="profile needs --profile"):
        make_table("profile", 4, 3, None)
