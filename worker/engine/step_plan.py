"""What one step runs: which rows decode, how far each may speculate, and which prompts go along. No model is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from speclen.worker.engine.copies import RowCopies
from speclen.worker.engine.length_chooser import StepFlag
from speclen.worker.engine.speculative import StepBatch
from speclen.worker.requests.request import RequestClass
from speclen.worker.requests.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens to feed of a sequence: ids, whose first has the place `start` in it."""

    sequence: SequenceState
    start: int
    ids: list[int]

    @property
    def end(self) -> int:
        """How many of the sequence's tokens are fed with it."""
        return self.start + len(self.ids)

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


@dataclass(slots=True)
class StepPlan:
    """rows: sequences of the pools' rows 0, 1, ..., which decode; the first num_drafting of them may draft.

    draft_lengths: draft tokens for each of them; speculation_length: the longest, for which the draft loop runs. drafts:
    whether the choice drafts, even if no row has any use for it in this step. chunks: of prompts. prefilled: whether time
    goes into prompts as well, the ones that were copied included. copies: None where the choice does not copy; read,
    num_new_rows: as in StepResult. sequences: all that take part, the rows and then those whose prompts are fed.
    """

    rows: list[SequenceState]
    num_drafting: int
    draft_lengths: list[int]
    chunks: list[PromptChunk]
    prefilled: bool
    drafts: bool = False
    copies: RowCopies | None = None
    read: tuple[tuple[int, int, int], ...] = ()
    num_new_rows: int = 0
    speculation_length: int = field(init=False)
    sequences: list[SequenceState] = field(init=False)

    def __post_init__(self) -> None:
        self.speculation_length = max(self.draft_lengths, default=0)
        self.sequences = self.rows + [chunk.sequence for chunk in self.chunks]

    @property
    def is_mixed(self) -> bool:
        """Whether some rows draft less than others."""
        return min(self.draft_lengths, default=0) < self.speculation_length

    @property
    def num_idle_rows(self) -> int:
        """Rows for which nothing is drafted although others draft."""
        return self.draft_lengths.count(0) if self.speculation_length else 0

    @property
    def num_copied(self) -> list[int]:
        """Tokens that each of the rows copies."""
        return [0] * len(self.rows) if self.copies is None else self.copies.num_copied

    @property
    def flags(self) -> set[StepFlag]:
        """What can be said beforehand of why the step must not teach."""
        flags = {StepFlag.PREFILL} if self.prefilled else set()
        if self.copies is not None:
            return flags | {StepFlag.COPIED}
        return flags | {StepFlag.MIXED_LENGTHS} if self.is_mixed else flags

    def apart(self) -> list[StepPlan]:
        """The same work in as many plans as can be: the rows, then every prompt by itself."""
        decoding = [replace(self, chunks=[])] if self.rows else []
        return decoding + [StepPlan([], 0, [], [chunk], True) for chunk in self.chunks]

    @property
    def proposes(self) -> bool:
        """Whether any row drafts or copies, or would if it had any use for it."""
        return self.drafts or self.speculation_length > 0 or self.copies is not None

    def plainly(self) -> StepPlan:
        """The same rows and prompts, for which nothing is proposed."""
        return replace(self, draft_lengths=[0] * len(self.rows), drafts=False, copies=None)

    def histogram(self, num_accepted: Sequence[int]) -> tuple[int, ...]:
        """How many rows accepted exactly 0, 1, ..., speculation_length tokens. num_accepted: by row."""
        counts = [0] * (self.speculation_length + 1)
        for number in num_accepted:
            counts[number] += 1
        return tuple(counts)

    def class_histograms(self, num_accepted: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same by class of request, for the classes there are; empty where all rows are greedy."""
        classes = [row.request_class for row in self.rows]
        if not any(classes):
            return ()
        return tuple(
            (
                int(kind),
                self.histogram([number for number, of in zip(num_accepted, classes, strict=True) if of == kind]),
            )
            for kind in sorted(set(classes))
        )


def rows_by_class(rows: Sequence[SequenceState]) -> tuple[int, ...]:
    """How many rows are greedy, cool and hot."""
    counts = [0] * len(RequestClass)
    for row in rows:
        counts[row.request_class] += 1
    return tuple(counts)


def plan_lengths(
    rows: Sequence[SequenceState], chosen_length: int, max_context_length: int, copies: RowCopies | None = None
) -> list[int]:
    """Draft tokens per row, for a step whose table says `chosen_length`.

    A row's own length goes before the table's, and no row drafts beyond the draft's context. Nothing is drafted that no row
    could use: the length is cut when all rows are that near to their last token. A single row near its end drafts on
    with the others, and what it does not need is cut from its output: so its step still teaches. A row that copies
    drafts where the plan says so, unless its settings look at the tokens before: drafts come after what was copied.
    """
    lengths, useful = [], 0
    num_copied = [0] * len(rows) if copies is None else copies.num_copied
    for row, copied in zip(rows, num_copied, strict=True):
        own = row.fixed_length if row.fixed_length is not None else chosen_length
        if copied and not (copies is not None and copies.plan.draft_after_copy and not row.sampling.looks_back):
            own = 0
        may_draft = row.may_draft and not row.has_slow_grammar
        length = max(0, min(own, max_context_length - len(row.tokens) - copied)) if may_draft else 0
        lengths.append(length)
        useful = max(useful, min(length, row.num_left - 1 - copied))
    return [min(length, useful) for length in lengths]


def plan_prompts(prefilling: Sequence[SequenceState], budget: int) -> list[PromptChunk]:
    """Up to `budget` tokens of prompts, first come first served.

    Of sequences that share a prompt one feeds it; the next ones wait until they can copy what it led to.
    """
    chunks: list[PromptChunk] = []
    for sequence in prefilling:
        shared = sequence.shared
        if budget <= 0 or (shared is not None and any(chunk.sequence.shared is shared for chunk in chunks)):
            break
        start = sequence.target_length
        chunks.append(PromptChunk(sequence, start, sequence.tokens[start : start + budget]))
        budget -= len(chunks[-1].ids)
    return chunks


def make_batch(plan: StepPlan, width: int, device: torch.device) -> StepBatch:
    """Tensors of the plan's rows. width: how many of the last tokens of each row the draft is fed."""
    return StepBatch(
        num_tokens=np.array([len(row.tokens) for row in plan.rows]),
        # Through numpy, which takes lists apart faster.
        recent_ids=torch.from_numpy(np.array([row.tokens[-width:] for row in plan.rows])).to(device),
        num_drafting=plan.num_drafting,
        caps=torch.tensor(plan.draft_lengths, device=device) if plan.is_mixed else None,
    )
