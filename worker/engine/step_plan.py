"""The work of one step: rows that decode, what is proposed for each, and prompts that go along. No model is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from speclen.records import PLAIN, Arm, StepFlag
from speclen.worker.backends.passes import padded_width
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.engine.proposals import propose_ngrams
from speclen.worker.engine.speculative import StepBatch
from speclen.worker.models.upload import upload
from speclen.worker.requests.request import TokenLogprobs
from speclen.worker.requests.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens to feed of a sequence: ids, whose first has the place `start` in it."""

    sequence: SequenceState
    start: int
    ids: list[int]

    @property
    def end(self) -> int:
        """Number of the sequence's tokens that are fed with it."""
        return self.start + len(self.ids)

    @property
    def completes_prompt(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


@dataclass(slots=True)
class Proposals:
    """For each row either n-gram tokens, or a number of tokens to draft, or neither.

    arm: what is run, as in StepRecord. is_mixed: True if requests asked for lengths of their own.
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
    """rows: sequences of the pools' rows 0, 1, ..., which decode; the first num_drafting of them may draft.

    choice: the arm that was selected; proposals: what comes of it in this step. chunks: of prompts. prefilled: True if
    time goes into prompts as well, the copied ones included. num_new_sequences: as in StepRecord. draft_length: the
    longest, for which the draft loop runs. sequences: the rows, then those whose prompts are fed.
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
    def has_ngrams(self) -> bool:
        return any(self.proposals.ngrams)

    @property
    def is_even(self) -> bool:
        """True if as many tokens are drafted for all rows."""
        return min(self.draft_lengths, default=0) == self.draft_length

    @property
    def flags(self) -> set[StepFlag]:
        """Known beforehand."""
        flags = {StepFlag.PREFILL} if self.prefilled else set()
        return flags | {StepFlag.MIXED_LENGTHS} if self.proposals.is_mixed else flags

    @property
    def speculates(self) -> bool:
        """True if the selected arm proposes anything, or a request does."""
        return self.choice.arm != PLAIN or self.proposals.arm != PLAIN

    def num_verified_tokens(self, ragged: bool) -> int:
        """Tokens that the target is given of the rows. ragged: only what each has, not a rectangle around the longest."""
        proposed = [ngrams + drafts for ngrams, drafts in zip(self.num_ngrams, self.draft_lengths, strict=True)]
        if ragged:
            return len(proposed) + sum(proposed)
        return len(proposed) * (1 + (padded_width(max(proposed)) if self.has_ngrams else self.draft_length))

    def apart(self) -> list[StepPlan]:
        """The same work in as many plans as can be: the rows, then every prompt by itself."""
        decoding = [replace(self, chunks=[])] if self.rows else []
        return decoding + [prefill_plan(chunk) for chunk in self.chunks]

    def plainly(self) -> StepPlan:
        """The same rows and prompts, for which nothing is proposed."""
        return replace(self, choice=self.choice._replace(arm=PLAIN), proposals=Proposals.none(len(self.rows)))

    def histogram(self, num_accepted: Sequence[int]) -> tuple[int, ...]:
        """Rows that accepted exactly 0, 1, ... proposed tokens. num_accepted: by row."""
        counts = [0] * (self.proposals.arm.max_tokens + 1)
        for number in num_accepted:
            counts[number] += 1
        return tuple(counts)

    def class_histograms(self, num_accepted: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The same by class of request, for the classes there are; empty where all rows are greedy."""
        classes = [row.request_class for row in self.rows]
        if not any(classes):
            return ()
        both = list(zip(num_accepted, classes, strict=True))
        return tuple(
            (int(kind), self.histogram([number for number, of in both if of == kind])) for kind in sorted(set(classes))
        )


@dataclass(slots=True)
class StepTokens:
    """New tokens of each of the plan's sequences, in its order; None where a prompt goes on.

    Empty where no token can be chosen, since the model gave logits that are NaN or infinite. logprobs: likewise, None
    where nobody asked for them. flags: the runner's reasons for which the step is no usable sample.
    """

    ids: list[list[int] | None] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    flags: set[StepFlag] = field(default_factory=set)


def prefill_plan(chunk: PromptChunk) -> StepPlan:
    """One piece of a prompt and nothing else."""
    return StepPlan([], 0, ArmChoice(PLAIN), Proposals.none(0), [chunk], True)


def plan_proposals(
    rows: Sequence[SequenceState],
    arm: Arm,
    max_context_length: int,
    draft_context_length: int,
    prefilling: Sequence[SequenceState] = (),
) -> Proposals:
    """Proposals of each sequence under an arm. A request's own length goes before the arm.

    prefilling: sequences whose prompts are indexed ahead.
    """
    lengths = plan_lengths(rows, arm.speculation_length, draft_context_length)
    is_mixed = len(set(lengths)) > 1
    if not arm.ngram:
        return Proposals(Arm(max(lengths, default=0)), lengths, [[] for _ in rows], is_mixed)
    ngrams = propose_ngrams(rows, prefilling, max_context_length)
    able = [row.may_use_ngrams and not row.has_slow_grammar for row in rows]
    has_room = any(may and row.room(max_context_length) > 0 for may, row in zip(able, rows, strict=True))
    drafted = [0 if ids else length for ids, length in zip(ngrams, lengths, strict=True)]
    ran = Arm(max(lengths, default=0), has_room)
    return Proposals(ran, cut_to_useful(rows, drafted), ngrams, is_mixed or len(set(able)) > 1)


def plan_lengths(rows: Sequence[SequenceState], length: int, draft_context_length: int) -> list[int]:
    """Tokens to draft for each row without n-grams; none beyond the context."""
    lengths = []
    for row in rows:
        own = row.fixed_length if row.fixed_length is not None else length
        may_draft = row.may_draft and not row.has_slow_grammar
        lengths.append(max(0, min(own, draft_context_length - len(row.tokens))) if may_draft else 0)
    return cut_to_useful(rows, lengths)


def cut_to_useful(rows: Sequence[SequenceState], lengths: list[int]) -> list[int]:
    """Lengths cut to what any row can use: less where all rows are near their last token.

    A single row near its end drafts on with the others, and what it does not need is cut from its output: so its step
    is still a usable sample.
    """
    useful = max((min(length, row.num_left - 1) for row, length in zip(rows, lengths, strict=True)), default=0)
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
        recent_ids=upload(np.array([row.tokens[-width:] for row in plan.rows]), device),
        num_drafting=plan.num_drafting,
        caps=None if plan.is_even else upload(np.array(plan.draft_lengths), device),
    )
