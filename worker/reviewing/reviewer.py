"""Looks at some outputs that have ended, to see how every plan would have got through them (`output.py`).

What a plan is worth cannot be seen from steps of others: those that copy end where copies were wrong, and requests that a
plan gets through quickly are rarely among its rows. Of an output as a whole it can. That takes one pass of the draft model
over it, between two steps, and therefore time of requests that wait: a small share, which is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from speclen.worker.backends.passes import PassModel, PassPart, StepRows
from speclen.worker.requests.sequence import SequenceState
from speclen.worker.reviewing.output import MOST_REVIEWED, OutputReview, review_copies
from speclen.worker.sampling.rules import choices_of, distributions_of

log = logging.getLogger(__name__)

# Share of the time of steps that reviewing may take, and after how many outputs it may take so much less.
SHARE, MANY, LATER_SHARE = 0.01, 1000, 0.0025
MOST_CREDIT_S = 0.1  # that a quiet time saves up
LEAST_TOKENS = 8  # of an output: fewer say little for what they take
SIZES = 32  # of passes: multiples of so many tokens
MOST_LOGITS = 2**22  # numbers of one pass, 16 MB
MOST_TOKENS = 8192  # prompt and output: longer ones would keep others waiting


class Reviewer:
    """draft: None when nothing can be drafted. prefill_chunk: tokens of a text that go through it in one pass, at most."""

    def __init__(self, target: PassModel, draft: PassModel | None, prefill_chunk: int, vocab_size: int) -> None:
        self._target, self._draft = target, draft
        self._prefill_chunk, self._chunk = prefill_chunk, max(SIZES, min(prefill_chunk, MOST_LOGITS // vocab_size))
        self._generator = torch.Generator(target.device).manual_seed(0)  # its own: outputs must not hang on reviews
        self._credit_s, self._num_reviewed = 0.0, 0
        self._works = True

    def review(self, rows: Sequence[SequenceState], step_s: float) -> tuple[OutputReview, ...]:
        """One of the rows whose output has just ended, if it is time for one. They must still hold their rows.

        step_s: that the step took. A failure is logged, and nothing is reviewed from then on.
        """
        share = SHARE if self._num_reviewed < MANY else LATER_SHARE
        self._credit_s = min(self._credit_s + share * step_s, MOST_CREDIT_S)
        ended = [row for row in rows if row.finished and self._can_review(row)]
        if not ended or self._credit_s <= 0.0 or not self._works:
            return ()
        started = time.perf_counter()
        try:
            reviewed = self._review(ended[self._num_reviewed % len(ended)])
        except Exception:
            log.exception("outputs cannot be reviewed: what lengths and plans are worth is learned from steps alone")
            self._works = False
            return ()
        self._num_reviewed += 1
        self._credit_s -= time.perf_counter() - started
        return (reviewed,)

    @staticmethod
    def _can_review(row: SequenceState) -> bool:
        """Whether it chose its tokens one like the other, at the table's lengths."""
        usual = row.may_copy and not row.sampling.looks_back
        return usual and row.row >= 0 and row.num_output_tokens > LEAST_TOKENS and len(row.tokens) <= MOST_TOKENS

    def _review(self, row: SequenceState) -> OutputReview:
        first = max(row.num_prompt_tokens + 1, len(row.tokens) - MOST_REVIEWED)
        drafted = b"" if self._draft is None or not row.may_draft else self._drafted(self._draft, row, first)
        return OutputReview(int(row.request_class), review_copies(row.tokens, first), drafted)

    def _drafted(self, draft: PassModel, row: SequenceState, first: int) -> bytes:
        """By token from place `first` on whether the draft model chooses it, too."""
        sampling, tokens = row.sampling, torch.tensor(row.tokens, device=draft.device)

        def chooses(logits: torch.Tensor, place: int) -> torch.Tensor:
            chosen = choices_of(sampling, logits, place - row.num_prompt_tokens)
            return chosen == tokens[place : place + len(logits)]

        def chance(logits: torch.Tensor, place: int) -> torch.Tensor:
            return distributions_of(sampling, logits).gather(-1, tokens[place : place + len(logits), None])[:, 0]

        held, matches = min(row.draft_length, first - 1), sampling.key is not None or sampling.temperature == 0
        same = self._of_tokens(draft, row, held, first, 0, chooses if matches else chance)
        row.draft_length = len(row.tokens) - 1
        if not matches:
            # A draft would have been drawn, and the token have come out of it with this chance, given that it came out.
            wanted = self._of_tokens(self._target, row, first - 1, first, first - 1, chance)
            same = torch.rand(len(wanted), generator=self._generator, device=draft.device) * wanted < same
        return bytes(same.to(torch.uint8).tolist())

    def _of_tokens(
        self,
        model: PassModel,
        row: SequenceState,
        held: int,
        first: int,
        least: int,
        what: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """Something of each token from place first on, by the logits before it, [n].

        held: tokens that the model's row holds. what: of logits [n, vocab] and the place of the first token that follows.
        Some of what the row holds is fed again, so that passes have few sizes: where one is new, that takes longer. Nothing
        before place `least`: others may share the prompt's keys and values, and on the target's hang their outputs.
        """
        end, found = len(row.tokens) - 1, []
        while held < end:
            alone = held < first - 1 and end - held > self._chunk  # what the model lacks before them
            stop = min(first - 1, held + self._prefill_chunk) if alone else min(end, held + self._chunk)
            begin = min(held, max(least, stop - rounded_up(stop - held)))
            num_wanted = max(0, stop - max(held, first - 1))
            rows = StepRows(np.array([begin]), stop - begin, model.device, first_row=row.row)
            ids = torch.tensor([row.tokens[begin:stop]], device=model.device)
            num_logits = min(max(rounded_up(num_wanted), 1), stop - begin)
            (logits,) = model.forward([PassPart(rows, ids, num_logits)])
            if num_wanted:
                found.append(what(logits[0, -num_wanted:], stop - num_wanted + 1))
            held = stop
        return torch.cat(found)


def rounded_up(num_tokens: int) -> int:
    """To the sizes of passes."""
    return -(-num_tokens // SIZES) * SIZES
