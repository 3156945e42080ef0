"""Delivery of new tokens to callers, and their counts. For the engine's thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from speclen.worker.requests.request import EngineFailedError, SequenceOutput, TokenLogprobs
from speclen.worker.requests.sequence import NewTokens, SequenceState

log = logging.getLogger(__name__)

NO_TOKEN = "the model gave logits that are NaN or infinite, from which no token can be chosen"


@dataclass(slots=True)
class Totals:
    """Counts since the start. Only tokens that went to callers count as generated and accepted.

    num_drafts: proposals, of one row in one step; num_draft_tokens: their tokens, num_ngram_tokens of them n-grams.
    num_accepted_by_position[j]: proposals whose token at position j was accepted; together num_accepted_tokens.
    """

    num_steps: int = 0
    num_row_steps: int = 0  # decoding rows, summed over steps
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_ngram_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)


class Outbox:
    """on_end: called with every sequence before its last output. max_proposed: tokens per row and step.

    holds_back: True if outputs wait for `deliver`, which must precede the sequence's next tokens; else they go at once.
    """

    def __init__(self, on_end: Callable[[SequenceState], None], max_proposed: int, holds_back: bool) -> None:
        self.holds_back = holds_back
        self._held_back: deque[tuple[SequenceState, NewTokens, list[TokenLogprobs] | None]] = deque()
        self.totals = Totals(num_accepted_by_position=[0] * max_proposed)
        self._on_end = on_end

    def count_step(
        self, rows: Sequence[SequenceState], draft_lengths: Sequence[int], num_ngrams: Sequence[int]
    ) -> None:
        """Count a step, before any delivery: receivers divide one count by another."""
        self.totals.num_steps += bool(rows)
        self.totals.num_row_steps += len(rows)
        self.totals.num_draft_tokens += sum(draft_lengths) + sum(num_ngrams)
        self.totals.num_ngram_tokens += sum(num_ngrams)
        for row, drafted, ngrams in zip(rows, draft_lengths, num_ngrams, strict=True):
            row.num_steps += 1
            row.num_draft_tokens += drafted + ngrams
            self.totals.num_drafts += drafted + ngrams > 0

    def hand_out(self, sequence: SequenceState, ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Append new tokens to a sequence for its caller; returns the number of them that were proposed.

        Tokens cut off by the end of the request do not count: they are no reason for longer drafts. Tokens that cannot be
        appended end their sequence, and so does their absence.
        """
        if not ids:
            log.warning("request %s ends: %s", sequence.request.request_id, NO_TOKEN)
            self._tell(sequence, sequence.abort(NO_TOKEN))
            return 0
        num_accepted = sequence.num_accepted_tokens
        try:
            new = sequence.append(ids)
        except Exception as error:
            log.exception("request %s cannot take its tokens; it ends", sequence.request.request_id)
            self.abort([sequence], error)
            return 0
        num_accepted = sequence.num_accepted_tokens - num_accepted
        self.totals.num_generated_tokens += len(new.ids)
        self.totals.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.totals.num_accepted_by_position[position] += 1
        if self.holds_back:
            self._held_back.append((sequence, new, logprobs))
        else:
            self._show(sequence, new, logprobs)
        return num_accepted

    def deliver(self) -> None:
        """Deliver held-back outputs. A sequence whose text cannot be made ends."""
        while self._held_back:
            self._show(*self._held_back.popleft())

    def _show(self, sequence: SequenceState, new: NewTokens, logprobs: list[TokenLogprobs] | None) -> None:
        try:
            output = sequence.show(new, logprobs)
        except Exception as error:
            log.exception("request %s cannot show its tokens; it ends", sequence.request.request_id)
            self.abort([sequence], error)
            return
        if output.error is not None:
            log.warning("request %s ends: %s", sequence.request.request_id, output.error)
        self._tell(sequence, output)

    def abort(self, sequences: Iterable[SequenceState], error: BaseException | None = None) -> None:
        """End sequences here. error: None if a caller asked for it."""
        for sequence in sequences:
            self._tell(sequence, sequence.abort(None if error is None else describe(error)))

    def _tell(self, sequence: SequenceState, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            self._on_end(sequence)
        try:
            sequence.on_output(output)
        except Exception:
            log.exception("the callback of request %s failed", sequence.request.request_id)


def describe(error: BaseException) -> str:
    """The error in a sentence for callers."""
    if isinstance(error, EngineFailedError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
