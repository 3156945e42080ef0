"""What one step feeds to the models: how far every row may speculate, and which prompts go along. No model is called."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from worker.sequence import Sequence
from worker.speculative import StepBatch


@dataclass(frozen=True, slots=True)
class StepLengths:
    """length: tokens that the draft loop runs for; caps: per row, None when every row may use all of them."""

    length: int
    caps: tuple[int, ...] | None

    def cap(self, row: int) -> int:
        return self.length if self.caps is None else self.caps[row]


def plan_lengths(rows: Rows[Sequence], chosen_length: int, max_context_length: int) -> StepLengths:
    """Lengths for a step whose table says `chosen_length`.

    A row's own length goes before the table's, and no row drafts beyond the context. Nothing is drafted that no row
    could use: the length is cut when all rows are that near to their last token. A single row near its end drafts on
    with the others, and what it does not need is cut from its output: so its step still teaches.
    """
    caps, useful = [], 0
    for row in rows:
        own = row.fixed_length if row.fixed_length is not None else chosen_length
        cap = min(own, max_context_length - len(row.tokens)) if row.may_draft else 0
        caps.append(cap)
        useful = max(useful, min(cap, row.num_left - 1))
    capped = tuple(min(cap, useful) for cap in caps)
    return StepLengths(useful, None if min(capped) == useful else capped)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens to feed of a sequence, ids, whose first has the place `start` in it; row: of the pools."""

    sequence: Sequence
    row: int
    start: int
    ids: list[int]


def plan_prompts(prefilling: Rows[Sequence], first_row: int, budget: int) -> list[PromptChunk]:
    """Up to `budget` tokens of prompts, first come first served. prefilling: sequences of rows first_row, ...

    Of sequences that share a prompt one feeds it; the next ones wait until they can copy what it led to.
    """
    chunks: list[PromptChunk] = []
    for row, sequence in enumerate(prefilling, first_row):
        shared = sequence.shared
        if budget <= 0 or (shared is not None and any(chunk.sequence.shared is shared for chunk in chunks)):
            break
        start = sequence.target_length
        chunks.append(PromptChunk(sequence, row, start, sequence.tokens[start : start + budget]))
        budget -= len(chunks[-1].ids)
    return chunks


def make_batch(
    rows: Rows[Sequence], num_drafting: int, lengths: StepLengths, width: int, device: torch.device
) -> StepBatch:
    """Tensors of one step. width: how many of the last tokens of each row the draft is fed."""
    return StepBatch(
        num_tokens=np.array([len(row.tokens) for row in rows]),
        recent_ids=torch.tensor([row.tokens[-width:] for row in rows], device=device),
        num_drafting=num_drafting,
        caps=None if lengths.caps is None else torch.tensor(lengths.caps, device=device),
    )
