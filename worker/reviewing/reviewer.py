"""Looks at some outputs that have ended, to see how every plan would have got through them (`output.py`).

What a plan is worth cannot be seen from steps of others: those that copy end where copies were wrong, and requests that a
plan gets through quickly are rarely among its rows. Of an output as a whole it can. That takes one pass of the draft model
over it, between two steps, and therefore time of requests that wait: a small share, which is counted, and each time no more
than a step or two take, or as much of a long output as fits.

Chance picks the outputs, each alike. If one were reviewed whenever there is time for it again, those that take long would
be reviewed more often: their own steps earn the time.
"""

from __future__ import annotations

import logging
import random
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
SHARE, MANY, LATER_SHARE = 0.01, 300, 0.0025
MOST_CREDIT_S = 0.1  # that a quiet time saves up, and the most that can be owed
REMEMBERED = 50.0  # outputs and reviews over which it is averaged how often there are any, and what they take
# How long one review may hold up the others: so long, or as long as the step before it.
MOST_S = 0.05
LEAST_TOKENS = 8  # of an output: fewer say little for what they take
FIRST_TOKENS = 64  # as long as it is not known how long a token takes
PACE_FADES = 0.9  # of what is known of it, when that forbids a review: it may have been measured at a bad moment
SIZES = 32  # of passes: multiples of so many tokens
MOST_LOGITS = 2**22  # numbers of one pass, 16 MB
MOST_TOKENS = 8192  # prompt and output: longer ones would keep others waiting


class Reviewer:
    """draft: None when nothing can be drafted. prefill_chunk: tokens of a text that go through it in one pass, at most."""

    def __init__(self, target: PassModel, draft: PassModel | None, prefill_chunk: int, vocab_size: int) -> None:
        self._target, self._draft = target, draft
        self._prefill_chunk, self._chunk = prefill_chunk, max(SIZES, min(prefill_chunk, MOST_LOGITS // vocab_size))
        # Its own: outputs must not hang on reviews.
        self._generator, self._random = torch.Generator().manual_seed(0), random.Random(0)
        self._credit_s, self._num_reviewed = 0.0, 0
        self._step_s = self._num_ended = 0.0  # of the steps so far, and outputs that ended in them, fading
        self._review_s = 0.0  # that a review takes; 0 before the first
        self._token_s: dict[PassModel, float] = {}  # what a token of a review's passes takes
        self._works = True

    def review(self, rows: Sequence[SequenceState], step_s: float) -> tuple[OutputReview, ...]:
        """One of the rows whose output has just ended, if it is time for one. They must still hold their rows.

        step_s: that the step took. A failure is logged, and nothing is reviewed from then on.
        """
        share = SHARE if self._num_reviewed < MANY else LATER_SHARE
        self._credit_s = min(self._credit_s + share * step_s, MOST_CREDIT_S)
        self._step_s += step_s
        ended = [row for row in rows if row.finished and self._can_review(row)]
        chance = self._chance(share, len(ended))
        chosen = [row for row in ended if self._random.random() < chance]
        if not chosen or self._credit_s <= -MOST_CREDIT_S or not self._works:
            return ()
        row = self._random.choice(chosen)
        window = self._window(row, max(MOST_S, step_s))
        if window is None:
            self._token_s = {model: PACE_FADES * token_s for model, token_s in self._token_s.items()}
            return ()
        started = time.perf_counter()
        try:
            reviewed = self._review(row, *window)
        except Exception:
            log.exception("outputs cannot be reviewed: what lengths and plans are worth is learned from steps alone")
            self._works = False
            return ()
        took_s = time.perf_counter() - started
        self._num_reviewed += 1
        self._credit_s -= took_s
        self._review_s += (took_s - self._review_s) / min(self._num_reviewed, REMEMBERED)
        return (reviewed,)

    def _chance(self, share: float, num_ended: int) -> float:
        """Of each output to be reviewed, so that it takes this share of the steps' time. num_ended: more of them by now."""
        if not num_ended:
            return 0.0
        self._num_ended += num_ended
        output_s = self._step_s / self._num_ended
        fade = max(0.0, 1.0 - num_ended / REMEMBERED)
        self._step_s *= fade
        self._num_ended *= fade
        return share * output_s / max(self._review_s, 1e-9)

    @staticmethod
    def _can_review(row: SequenceState) -> bool:
        """Whether it chose its tokens one like the other, at the table's lengths."""
        usual = row.may_copy and not row.sampling.looks_back
        return usual and row.row >= 0 and row.num_output_tokens > LEAST_TOKENS and len(row.tokens) <= MOST_TOKENS

    def _window(self, row: SequenceState, most_s: float) -> tuple[int, int] | None:
        """Places of an output from which and up to which it can be reviewed in the time; None when that is too little.

        Of an output that is too long for it a part anywhere, since its beginning and its end are not like the rest.
        """
        begin, end = row.num_prompt_tokens + 1, len(row.tokens)
        num_tokens = min(end - begin, MOST_REVIEWED)
        if any(model not in self._token_s for model, _ in self._passes(row, begin, end)):
            num_tokens = min(num_tokens, FIRST_TOKENS)
        while num_tokens >= LEAST_TOKENS:
            first = self._random.randint(begin, end - num_tokens)
            passes = self._passes(row, first, first + num_tokens)
            if sum(self._token_s.get(model, 0.0) * num_fed for model, num_fed in passes) <= most_s:
                return first, first + num_tokens
            num_tokens //= 2
        return None

    def _passes(self, row: SequenceState, first: int, stop: int) -> list[tuple[PassModel, int]]:
        """The models that a review of these places asks, and the tokens that each is fed."""
        if self._draft is None or not row.may_draft:
            return []
        passes = [(self._draft, stop - 1 - min(row.draft_length, first - 1))]
        return passes if _is_determined(row) else [*passes, (self._target, stop - first)]

    def _review(self, row: SequenceState, first: int, stop: int) -> OutputReview:
        drafted = b"" if self._draft is None or not row.may_draft else self._drafted(self._draft, row, first, stop)
        copies = review_copies(row.tokens[:stop], first)
        return OutputReview(int(row.request_class), copies, drafted, row.num_output_tokens - 1)

    def _drafted(self, draft: PassModel, row: SequenceState, first: int, stop: int) -> bytes:
        """By token from place `first` on whether the draft model chooses it, too."""
        sampling, tokens = row.sampling, torch.tensor(row.tokens, device=draft.device)

        def chooses(logits: torch.Tensor, place: int) -> torch.Tensor:
            chosen = choices_of(sampling, logits, place - row.num_prompt_tokens)
            return chosen == tokens[place : place + len(logits)]

        def chance(logits: torch.Tensor, place: int) -> torch.Tensor:
            return distributions_of(sampling, logits).gather(-1, tokens[place : place + len(logits), None])[:, 0]

        held, determined = min(row.draft_length, first - 1), _is_determined(row)
        same = self._of_tokens(draft, row, held, first, stop, 0, chooses if determined else chance)
        row.draft_length = max(row.draft_length, stop - 1)
        if not determined:
            # A draft would have been drawn, and the token have come out of it with this chance, given that it came out.
            wanted = self._of_tokens(self._target, row, first - 1, first, stop, first - 1, chance)
            same = torch.rand(len(wanted), generator=self._generator) * wanted < same
        return bytes(same.to(torch.uint8).tolist())

    def _of_tokens(
        self,
        model: PassModel,
        row: SequenceState,
        held: int,
        first: int,
        stop_at: int,
        least: int,
        what: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """Something of each token from place first up to stop_at, by the logits before it, [n], on the CPU.

        held: tokens that the model's row holds. what: of logits [n, vocab] and the place of the first token that follows.
        Some of what the row holds is fed again, so that passes have few sizes: where one is new, that takes longer. Nothing
        before place `least`: others may share the prompt's keys and values, and on the target's hang their outputs.
        """
        end, found, started, num_fed = stop_at - 1, [], time.perf_counter(), stop_at - 1 - held
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
        values = torch.cat(found).cpu()
        token_s = (time.perf_counter() - started) / num_fed
        self._token_s[model] = (self._token_s.get(model, token_s) + token_s) / 2
        return values


def _is_determined(row: SequenceState) -> bool:
    """Whether the tokens of a row follow from their logits: it is greedy, or has a seed."""
    return row.sampling.key is not None or row.sampling.temperature == 0


def rounded_up(num_tokens: int) -> int:
    """To the sizes of passes."""
    return -(-num_tokens // SIZES) * SIZES
