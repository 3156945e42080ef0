"""Prompts have exactly the length asked for, come from unseen files, and are the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speclen.worker.profiling.prompts import PromptSource, held_out_texts, is_held_out, texts_from_file
from tests.support import tiny_models


def test_prompts_have_the_length_asked_for_even_beyond_one_text() -> None:
    source = PromptSource(tiny_models.tokenizer(), ["a b c", "def step(self, batch): return"], seed=3)
    for length in (1, 2, 7, 200):
        assert len(source.draw(length)) == length


def test_held_out_files_are_few_and_decided_by_path_alone() -> None:
    paths = [f"package/module_{number}.py" for number in range(2000)]
    share = sum(map(is_held_out, paths)) / len(paths)
    assert 0.03 < share < 0.06  # 4% of 256 values is 11 of them, 4.3%
    assert len(held_out_texts()) > 10


def test_prompt_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps("one\n\ntwo") + "\n\n" + json.dumps("three") + "\n")
    assert texts_from_file(lines) == ["one\n\ntwo", "three"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", "\n\n", "holds no prompts"),
        ("bad.jsonl", "{not json}", "cannot read"),
        ("bad.jsonl", '{"text": "x"}', "holds no prompts"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, name: str, content: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=reason) as error:
        texts_from_file(path)
    assert name in str(error.value)
    with pytest.raises(ValueError, match="cannot read"):
        texts_from_file(tmp_path / "missing.txt")
