"""The plan of one step: the decoding rows, what is proposed for each, and the prompt chunks. Calls no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from speclen.records import PLAIN, Arm, StepFlag
from speclen.worker.arms import ArmChoice
from speclen.worker.backends.passes import padded_width
from speclen.worker.requests.ngrams import LEAST_BESIDE_DRAFT, NgramIndex
from speclen.worker.requests.sequence import SequenceState

# Prompt tokens that are indexed in a step, over all sequences: half a millisecond. New output is indexed as well.
INDEXED_PER_STEP = 256
MOST_NEW = 128  # upper bound on the tokens that a sequence generates in a step


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens of a sequence to prefill. start: position of the first one."""

    sequence: SequenceState
    start: int
    ids: list[int]

    @property
    def end(self) -> int:
        """Number of tokens of the sequence up to the end of the chunk."""
        return self.start + len(self.ids)

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


@dataclass(slots=True)
class Proposals:
    """The proposals for each row: n-gram tokens, or a number of tokens to draft, or nothing.

    arm: as in StepRecord. is_mixed: True if requests have speculation lengths of their own.
    """

    arm: Arm
    draft_lengths: list[int]
    ngrams: list[list[int]]
    is_mixed: bool = False

    @classmethod
    def none(cls, num_rows: int) -> Proposals:
        """Plain decoding."""
        return cls(PLAIN, [0] * num_rows, [[] for _ in range(num_rows)])


@dataclass(slots=True)
class StepPlan:
    """The work of one step.

    rows: the decoding sequences, in rows 0, 1, ... of the KV caches; the first num_drafting may draft. choice: the selected
    arm. chunks: prompt chunks to prefill. prefilled: True if the step prefills or copies a prompt. num_new_sequences: as in
    StepRecord. draft_length: largest draft length of a row. sequences: the rows, then the sequences of the chunks.
    """

    rows: list[SequenceState]
    num_drafting: int
    choice: ArmChoice
    proposals: Proposals
    chunks: list[PromptChunk]
    prefilled: bool
    num_new_sequences: int = 0
    draft_length: int = field(init=False)
    sequences: list[SequenceState] = field(init=False)

    def __post_init__(self) -> None:
        self.draft_length = max(self.draft_lengths, default=0)
        self.sequences = self.rows + [chunk.sequence for chunk in self.chunks]

    @property
    def draft_lengths(self) -> list[int]:
        """Tokens that the draft model drafts for each row."""
        return self.proposals.draft_lengths

    @property
    def num_ngrams(self) -> list[int]:
        """N-gram tokens of each row."""
        return [len(ids) for ids in self.proposals.ngrams]

    @property
    def num_proposed(self) -> list[int]:
        """Number of tokens proposed for each row, n-gram or draft tokens."""
        return [ngrams + drafts for ngrams, drafts in zip(self.num_ngrams, self.draft_lengths, strict=True)]

    @property
    def has_ngrams(self) -> bool:
        return any(self.proposals.ngrams)

    def ngram_table(self, width: int) -> np.ndarray:
        """N-gram tokens of the rows, [rows, width], padded with zeros."""
        table = np.zeros((len(self.rows), width), np.int64)
        for row, ids in enumerate(self.proposals.ngrams):
            table[row, : len(ids)] = ids
        return table

    @property
    def drafting(self) -> list[SequenceState]:
        """The rows for which the draft model drafts."""
        return [row for row, length in zip(self.rows, self.draft_lengths, strict=True) if length]

    @property
    def is_even(self) -> bool:
        """True if all rows have the same draft length."""
        return min(self.draft_lengths, default=0) == self.draft_length

    @property
    def flags(self) -> set[StepFlag]:
        """Flags that are known before the step."""
        flags = {StepFlag.PREFILL} if self.prefilled else set()
        return flags | {StepFlag.MIXED_LENGTHS} if self.proposals.is_mixed else flags

    def num_verified_tokens(self, ragged: bool) -> int:
        """Tokens of the rows in the target's forward pass. ragged: without padding to the longest row."""
        proposed = self.num_proposed
        if ragged:
            return len(proposed) + sum(proposed)
        return len(proposed) * (1 + (padded_width(max(proposed)) if self.has_ngrams else self.draft_length))

    def apart(self) -> list[StepPlan]:
        """The same work as several plans: one for the rows, and one for every prompt."""
        decoding = [replace(self, chunks=[])] if self.rows else []
        alone = StepPlan([], 0, ArmChoice(PLAIN), Proposals.none(0), [], prefilled=True)
        return decoding + [replace(alone, chunks=[chunk]) for chunk in self.chunks]

    def plainly(self) -> StepPlan:
        """The same rows and prompts without proposals."""
        return replace(self, choice=self.choice._replace(arm=PLAIN), proposals=Proposals.none(len(self.rows)))

    def histogram(self, num_accepted: Sequence[int]) -> tuple[int, ...]:
        """Number of rows that accepted exactly 0, 1, ... proposed tokens. num_accepted: of each row."""
        counts = [0] * (self.proposals.arm.max_tokens + 1)
        for number in num_accepted:
            counts[number] += 1
        return tuple(counts)

    def class_histograms(self, num_accepted: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same for each request class in the batch; empty if all rows are greedy."""
        classes = [row.request_class for row in self.rows]
        if not any(classes):
            return ()
        both = list(zip(num_accepted, classes, strict=True))
        return tuple(
            (int(kind), self.histogram([number for number, of in both if of == kind])) for kind in sorted(set(classes))
        )


def plan_proposals(
    rows: Sequence[SequenceState],
    arm: Arm,
    max_context_length: int,
    draft_context_length: int,
    prefilling: Sequence[SequenceState] = (),
) -> Proposals:
    """Plan the proposals for each row under an arm. A request's own speculation length takes precedence.

    prefilling: sequences whose prompts are indexed ahead of time.
    """
    lengths = plan_lengths(rows, arm.speculation_length, draft_context_length)
    is_mixed = len(set(lengths)) > 1
    if not arm.ngram:
        return Proposals(Arm(max(lengths, default=0)), lengths, [[] for _ in rows], is_mixed)
    ngrams = propose_ngrams(rows, lengths, prefilling, max_context_length)
    able = [row.may_use_ngrams and not row.has_slow_grammar for row in rows]
    has_room = any(may and row.room(max_context_length) > 0 for may, row in zip(able, rows, strict=True))
    drafted = [0 if ids else length for ids, length in zip(ngrams, lengths, strict=True)]
    ran = Arm(max(lengths, default=0), has_room)
    return Proposals(ran, cut_to_useful(rows, drafted), ngrams, is_mixed or len(set(able)) > 1)


def plan_lengths(rows: Sequence[SequenceState], length: int, draft_context_length: int) -> list[int]:
    """Number of tokens to draft for each row without n-grams, within the draft model's context."""
    lengths = []
    for row in rows:
        own = row.fixed_length if row.fixed_length is not None else length
        may_draft = row.may_draft and not row.has_slow_grammar
        lengths.append(max(0, min(own, draft_context_length - len(row.tokens))) if may_draft else 0)
    return cut_to_useful(rows, lengths)


def cut_to_useful(rows: Sequence[SequenceState], lengths: list[int]) -> list[int]:
    """Lengths cut to the largest that any row can use, which is less if all rows are near their last token.

    A single row near its end drafts as much as the others, and its output is cut, so that the step is a usable sample.
    """
    useful = max((min(length, row.num_left - 1) for row, length in zip(rows, lengths, strict=True)), default=0)
    return [min(length, useful) for length in lengths]


def plan_prompts(prefilling: Sequence[SequenceState], budget: int) -> list[PromptChunk]:
    """Chunks of up to `budget` prompt tokens in all, first come first served.

    Of the sequences that share a prompt, one prefills it, and the others wait to copy its keys and values.
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


def propose_ngrams(
    rows: Sequence[SequenceState],
    lengths: Sequence[int],
    prefilling: Sequence[SequenceState],
    max_context_length: int,
) -> list[list[int]]:
    """N-gram tokens of each row: none without a match, or until all tokens of the row are indexed.

    lengths: tokens that the draft model would draft for each row. prefilling: sequences whose prompts are indexed ahead of
    time, over several steps if they are long.
    """
    budget = INDEXED_PER_STEP
    for row in rows:
        budget -= _index(row, budget)
    for row in prefilling:
        if budget > 0:
            budget -= _index(row, budget)
    return [_propose(row, length, max_context_length) for row, length in zip(rows, lengths, strict=True)]


def _propose(row: SequenceState, length: int, max_context_length: int) -> list[int]:
    index, most = row.ngram_index, row.room(max_context_length)
    if not row.may_use_ngrams or index is None or index.num_indexed < len(row.tokens) or most <= 0:
        return []
    ids = index.propose()
    return ids[:most] if not length or len(ids) >= LEAST_BESIDE_DRAFT else []


def _index(row: SequenceState, budget: int) -> int:
    """Extend the row's index by new output, or by up to `budget` prompt tokens. Returns the part of the budget used."""
    if not row.may_use_ngrams:
        return 0
    index = row.ngram_index = row.ngram_index or NgramIndex()
    if len(row.tokens) - index.num_indexed <= MOST_NEW:
        index.extend(row.tokens, MOST_NEW)
        return 0
    return index.extend(row.tokens, max(0, budget))
