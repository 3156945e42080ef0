"""A sequence that is being generated: its tokens, its text, its slot, and the reason of its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from speclen.worker.requests.detokenize import Decode, Detokenizer, StopStrings
from speclen.worker.requests.ngrams import NgramIndex
from speclen.worker.requests.request import FinishReason, GenerationRequest, SequenceOutput, TokenLogprobs
from speclen.worker.sampling import noise
from speclen.worker.sampling.logits import RowEdits
from speclen.worker.sampling.rules import RowSampling

log = logging.getLogger(__name__)

OnOutput = Callable[[SequenceOutput], None]


@dataclass(slots=True)
class SharedPrompt:
    """State shared by the n sequences of a request. logits: [1, 1, vocab] after the prompt; None until it is prefilled."""

    logits: torch.Tensor | None = None


@dataclass(slots=True)
class NewTokens:
    """Tokens appended in a step, and the reason if they end the sequence. text: set if stop strings needed it at once."""

    ids: list[int]
    text: str | None
    reason: FinishReason | None
    matched: int | str | None
    error: str | None


class SequenceState:
    """The index-th output of a request.

    tokens: prompt and output. target_length, draft_length: how many of the first tokens are in the models' KV caches. row:
    its slot, set by the scheduler; -1 without one. limit: largest number of tokens, prompt included. draft_context_length:
    the draft model proposes up to this many tokens; 0 without a draft model. fixed_length: the request's speculation
    length; None: the table decides, and n-grams are allowed. shared: None if n is 1. hidden: texts of special tokens that
    `decode` leaves out.
    """

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        on_output: OnOutput,
        *,
        decode: Decode,
        eos_token_ids: tuple[int, ...],
        max_context_length: int,
        draft_context_length: int,
        shared: SharedPrompt | None = None,
        hidden: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.index = index
        self.on_output = on_output
        self.shared = shared
        self.tokens = list(request.prompt_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.limit = min(self.num_prompt_tokens + sampling.max_tokens, max_context_length)
        self.fixed_length = request.fixed_length
        self.request_class = sampling.request_class
        self._drafts_below = draft_context_length if request.fixed_length != 0 else 0
        self.may_use_ngrams = request.fixed_length is None
        self.ngram_index: NgramIndex | None = None  # made when an arm first has n-grams
        self.row = -1
        self.target_length = 0
        self.draft_length = 0
        self.draft_due = self.num_prompt_tokens  # tokens that the draft model's KV cache holds unless it is behind
        self.num_steps = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.finished = False
        self.failed = False  # by an internal error: its slot's contents may be damaged
        self.admitted_at: float | None = None  # time.monotonic at which it got its slot
        self.sampling = RowSampling()  # replaced when it gets its slot
        # A grammar allows the end token only where the output ends, so it is never ignored.
        ignored = sampling.ignore_eos and request.grammar is None
        self._eos = frozenset() if ignored else frozenset(eos_token_ids)
        self._ends = self._eos | frozenset(sampling.stop_token_ids)
        self._detokenizer = Detokenizer(decode, request.prompt_ids)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output, hidden) if sampling.stop else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def may_draft(self) -> bool:
        """True if the draft model may propose its next tokens. Once False, since it is too long, it stays False."""
        return len(self.tokens) < self._drafts_below

    def disable_speculation(self) -> None:
        """Propose nothing for it from now on."""
        self._drafts_below, self.may_use_ngrams, self.ngram_index = 0, False, None

    @property
    def num_left(self) -> int:
        """Tokens it may still generate."""
        return self.limit - len(self.tokens)

    @property
    def has_slow_grammar(self) -> bool:
        """True if its grammar is too slow for proposals, since every proposed token needs a mask."""
        return self.sampling.grammar is not None and self.sampling.grammar.is_slow

    def room(self, max_context_length: int) -> int:
        """Number of tokens that may be proposed for it now. Its last token is never a proposed one."""
        return 0 if self.has_slow_grammar else min(self.num_left - 1, max_context_length - len(self.tokens))

    def start_sampling(self, vocab_size: int, device: torch.device) -> None:
        """Make the sampling state, once, when the sequence gets its slot."""
        self.admitted_at = time.monotonic()
        self.sampling = make_row_sampling(self.request, self.index, sorted(self._ends), vocab_size, device)

    def append(self, ids: list[int]) -> NewTokens:
        """Append new tokens up to the end of the sequence. `output` turns the result into the caller's output."""
        ids, reason, end_token = self._cut_at_end_token(ids[: self.num_left])
        grammar = self.sampling.grammar
        if grammar is not None and (num_followed := grammar.append(ids)) < len(ids):
            ids, reason, end_token = ids[:num_followed], None, None
        matched: int | str | None = end_token
        text = None
        if self._stops is not None:
            num_searched, text, stop = self._search_stop_strings(ids, len(self._visible(ids, reason, end_token)))
            if stop is not None:
                ids, reason, matched = ids[:num_searched], FinishReason.STOP, stop
        self.tokens += ids
        # One of the tokens of every step is not a proposed one.
        self.num_accepted_tokens += max(0, len(ids) - 1)
        if self.sampling.edits is not None:
            self.sampling.edits.append(ids)
        if reason is None and self.num_left <= 0:
            reason = FinishReason.LENGTH
        error = None
        if reason is None and grammar is not None and grammar.failure:
            reason, error = FinishReason.ABORT, f"the grammar cannot be followed any further: {grammar.failure}"
        self.finished = reason is not None
        return NewTokens(ids, text, reason, matched, error)

    def output(self, new: NewTokens, logprobs: list[TokenLogprobs] | None = None) -> SequenceOutput:
        """The output for the caller. To be called once after every `append`."""
        text, ids = new.text, new.ids
        if text is None:
            text = self._detokenizer.push(self._visible(ids, new.reason, new.matched))
        if new.reason is not None and not isinstance(new.matched, str):
            text += self._rest()
        wanted = tuple(logprobs[: len(ids)]) if logprobs and self.request.sampling.logprobs is not None else ()
        ended = {"finish_reason": new.reason, "matched_stop": new.matched, "error": new.error}
        return self._output(token_ids=tuple(ids), text=text, logprobs=wanted, is_callers=new.error is not None, **ended)

    def abort(self, error: str | None = None) -> SequenceOutput:
        """End the sequence here, and emit the text held back. error: the failure; None if the caller aborted it."""
        self.finished = True
        self.failed = error is not None
        try:
            text = self._rest()
        except Exception:
            log.exception("the last text of request %s cannot be decoded", self.request.request_id)
            text = ""
        return self._output(token_ids=(), text=text, finish_reason=FinishReason.ABORT, error=error)

    def _output(self, **news: Any) -> SequenceOutput:
        """An output with the totals so far. news: its new tokens, text and end."""
        return SequenceOutput(
            request_id=self.request.request_id,
            index=self.index,
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self.num_output_tokens,
            num_steps=self.num_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            admitted_at=self.admitted_at,
            made_at=time.monotonic(),
            **news,
        )

    def _cut_at_end_token(self, ids: list[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """The tokens up to and including the first end or stop token, with the reason and that token if there is one."""
        if self._ends.isdisjoint(ids):
            return ids, None, None
        first_possible = self.request.sampling.min_tokens - self.num_output_tokens
        grammar_ends = self._eos if self.request.grammar is not None else frozenset[int]()
        for at, token in enumerate(ids):
            if token in self._ends and (at >= first_possible or token in grammar_ends):
                return ids[: at + 1], FinishReason.STOP, token
        return ids, None, None

    def _visible(self, ids: list[int], reason: FinishReason | None, matched: int | str | None) -> list[int]:
        """Tokens whose text is in the output: all but the end token, unless special tokens are included."""
        if reason is not FinishReason.STOP:
            return ids
        keeps_end = matched in self._eos and self.request.sampling.include_special_tokens
        return ids if keeps_end else ids[:-1]

    def _search_stop_strings(self, ids: list[int], num_visible: int) -> tuple[int, str, str | None]:
        """Number of tokens up to the first complete stop string, their text up to it, and the stop string.

        num_visible: number of the tokens whose text is in the output.
        """
        assert self._stops is not None
        text = ""
        for at, token in enumerate(ids):
            may_stop = self.num_output_tokens + at >= self.request.sampling.min_tokens
            new = self._detokenizer.push([token]) if at < num_visible else ""
            piece, stop = self._stops.push(new + self._stops.mark(token), may_stop)
            text += piece
            if stop is not None:
                return at + 1, text, stop
        return len(ids), text, None

    def _rest(self) -> str:
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        text, _ = self._stops.push(rest)
        return text + self._stops.flush()


def make_row_sampling(
    request: GenerationRequest, index: int, end_ids: list[int], vocab_size: int, device: torch.device
) -> RowSampling:
    """The sampling state of one sequence. end_ids: tokens forbidden before min_tokens, unless the grammar needs them."""
    sampling, grammar = request.sampling, None
    if request.grammar is not None:
        grammar = request.grammar.start(end_ids, sampling.min_tokens, sampling.ignore_eos)
        end_ids = []
    edits = None
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    if penalties != (1.0, 0.0, 0.0) or sampling.logit_bias or (sampling.min_tokens and end_ids):
        prompt_ids, bias = request.prompt_ids, sampling.logit_bias
        edits = RowEdits(vocab_size, device, prompt_ids, *penalties, bias, end_ids, sampling.min_tokens)
    key = None if sampling.seed is None else noise.make_key(sampling.seed, index)
    return RowSampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, key, edits, grammar)
