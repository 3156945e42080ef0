"""Answers of the chat model that `scripts/train_chat_draft.py` learns from, and their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from speclen.worker.requests.request import SequenceOutput


@dataclass(slots=True)
class Row:
    """A prompt and its answer. labels, log_probs: of every answer token, the target's likeliest tokens in its place."""

    ids: list[int]
    prompt_length: int
    labels: Any = field(default_factory=list)
    log_probs: Any = field(default_factory=list)

    def take(self, output: SequenceOutput) -> None:
        self.ids.extend(output.token_ids)
        self.labels.extend(one.top_ids for one in output.logprobs)
        self.log_probs.extend(one.top_logprobs for one in output.logprobs)


def write_rows(file: Path, rows: list[Row]) -> None:
    np.savez(
        file,
        ids=np.concatenate([np.array(row.ids, np.uint16) for row in rows]),
        lengths=np.array([len(row.ids) for row in rows]),
        prompt_lengths=np.array([row.prompt_length for row in rows]),
        labels=np.concatenate([np.array(row.labels, np.uint16) for row in rows]),
        log_probs=np.concatenate([np.array(row.log_probs, np.float16) for row in rows]),
    )


def read_rows(work: Path) -> list[Row]:
    """Answers of all runs."""
    rows = []
    for file in sorted(work.glob("answers-*.npz")):
        kept = dict(np.load(file))
        ends = np.cumsum(kept["lengths"])
        answers_end = np.cumsum(kept["lengths"] - kept["prompt_lengths"])
        for end, answer_end, length, prompt in zip(
            ends, answers_end, kept["lengths"], kept["prompt_lengths"], strict=True
        ):
            place = slice(answer_end - (length - prompt), answer_end)
            ids = kept["ids"][end - length : end]
            rows.append(Row(ids, int(prompt), kept["labels"][place], kept["log_probs"][place]))
    return rows
