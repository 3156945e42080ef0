"""Answers of the chat model that `scripts/train_chat_draft.py` learns from, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speclen.worker.requests.request import GenerationRequest, SequenceOutput


@dataclass(slots=True)
class Row:
    """A prompt and its answer. labels, log_probs: of every answer token, the target's likeliest tokens in its place."""

    ids: list[int]
    prompt_length: int
    labels: Any
    log_probs: Any


def row_of(request: GenerationRequest, outputs: list[SequenceOutput]) -> Row:
    """A prompt with its whole answer."""
    tokens = [token for output in outputs for token in output.token_ids]
    likely = [one for output in outputs for one in output.logprobs]
    ids, num = [*request.prompt_ids, *tokens], len(request.prompt_ids)
    return Row(ids, num, [one.top_ids for one in likely], [one.top_logprobs for one in likely])


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
