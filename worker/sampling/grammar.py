"""Grammars as masks over the vocabulary, one for every position of a step, including those of draft tokens.

Masks apply to the logits of draft and target alike, after other edits and before temperature and truncation. So forbidden
tokens are neither proposed nor accepted, and the output follows the target's distribution restricted to allowed tokens,
whatever was drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from speclen.worker.models.devices import upload

SLOW_MASK_S = 0.002
MASK_SMOOTHING = 0.2  # weight of the newest time of a mask
# llguidance's LLMatcher. After an error it stays in error. End tokens are allowed wherever the output may end.
Matcher: TypeAlias = Any


class Grammar:
    """A compiled grammar, for any number of outputs. matcher: stays at the beginning of the grammar.

    end_ids: tokens that end an output. num_bytes: memory that the compilation took.
    """

    def __init__(self, matcher: Matcher, vocab_size: int, end_ids: Sequence[int], num_bytes: int = 0) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.end_ids = tuple(end_ids)
        self.num_bytes = num_bytes

    def start(self, held_back: Sequence[int] = (), min_tokens: int = 0, go_on: bool = False) -> GrammarState:
        """State of a new output.

        held_back: tokens forbidden before output position min_tokens. go_on: True if end tokens are always forbidden.
        Neither applies if the grammar allows nothing else.
        """
        return GrammarState(self, held_back, min_tokens, go_on)


class GrammarState:
    """An output's position in its grammar, and the draft tokens that the matcher has read beyond it.

    failure: the reason why the output cannot follow the grammar any further; "" while it can. If the matcher fails on draft
    tokens, that is not a failure, since the output may never get there: they are rejected, and another matcher is brought to
    the end of the output.
    """

    def __init__(self, grammar: Grammar, held_back: Sequence[int], min_tokens: int, go_on: bool) -> None:
        self.failure = ""
        self._matcher: Matcher | None = grammar.matcher.deep_copy()
        self._kept, self._num_kept = grammar.matcher, 0  # a spare matcher, and the number of output tokens it has read
        self._mask_s = 0.0  # mean time of recent masks
        self._vocab_size = grammar.vocab_size
        self._end_ids = frozenset(grammar.end_ids)
        self._early = np.array([*held_back], dtype=np.int64)  # forbidden before min_tokens
        self._all_ends = np.array([*grammar.end_ids], dtype=np.int64)
        self._ends = self._all_ends if go_on else self._all_ends[:0]  # always forbidden
        self._min_tokens = min_tokens
        self._output: list[int] = []
        self._ahead: list[int] = []  # tokens beyond the output that the matcher has read
        self._masks: list[np.ndarray] = []  # [vocab] after the output and the first 0, 1, ... of these tokens
        # Token paths beyond the output whose last token cannot be read, or after which there is no mask, with the reason.
        self._unreadable: dict[tuple[int, ...], str] = {}
        self._dead_ends: dict[tuple[int, ...], str] = {}

    @property
    def is_slow(self) -> bool:
        """True if its masks are slow. Then nothing is proposed, since all sequences would wait for the masks."""
        return self._mask_s > SLOW_MASK_S

    def append(self, ids: Sequence[int]) -> int:
        """Append output tokens, with an end token last if there is one. Returns how many are allowed; fewer is a failure."""
        for at, token in enumerate(ids):
            mask = self._mask(at)
            if mask is None or not mask[token]:
                self._fail(self._dead_ends.get(tuple(ids[:at])) or f"it does not allow token {token}")
                return self._move_on(ids[:at])
            if token in self._end_ids:
                return self._move_on(ids[:at]) + 1
            if not self._read(ids, at):
                self._fail(self._unreadable[tuple(ids[: at + 1])])
                return self._move_on(ids[:at])
        return self._move_on(ids)

    def _move_on(self, ids: Sequence[int]) -> int:
        self.rewind(len(ids))
        self._output += ids
        self._unreadable.clear()
        self._dead_ends.clear()
        del self._masks[: len(ids)]
        del self._ahead[: len(ids)]
        return len(ids)

    def rewind(self, num_ahead: int = 0) -> None:
        """Roll the matcher back to num_ahead tokens beyond the output."""
        extra = len(self._ahead) - num_ahead
        if extra > 0:
            if self._matcher is not None:
                self._matcher.rollback(extra)
            del self._ahead[num_ahead:]
            del self._masks[num_ahead + 1 :]

    def masks(self, draft: Sequence[int], first: int, columns: int) -> list[np.ndarray | None]:
        """Masks of a number of columns: after the output and the first `first`, `first + 1`, ... draft tokens.

        A mask is None if it is unknown, or not needed since an earlier draft token is forbidden.
        """
        began = time.perf_counter()
        try:
            return self._masks_of(draft, first, columns)
        finally:
            took_s = time.perf_counter() - began
            self._mask_s += MASK_SMOOTHING * (took_s / max(1, columns) - self._mask_s)

    def _masks_of(self, draft: Sequence[int], first: int, columns: int) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = []
        for depth in range(first + columns):
            if depth and not self._read(draft, depth - 1):
                return [*found[first:], *[None] * (first + columns - max(depth, first))]
            found.append(self._mask(depth))
        return found[first:]

    def _read(self, tokens: Sequence[int], at: int) -> bool:
        """Read tokens[at] after those before it. Returns True if it is allowed and something may follow."""
        token = tokens[at]
        if at < len(self._ahead) and self._ahead[at] == token:
            return True
        self.rewind(at)
        mask = self._mask(at)
        path = (*self._ahead, token)
        if mask is None or token in self._end_ids or not mask[token] or path in self._unreadable:
            return False
        matcher = self._ready_matcher()
        if not matcher.consume_token(token):
            self._unreadable[path] = matcher.get_error()
            self._matcher = None
            return False
        self._ahead.append(token)
        return True

    def _mask(self, depth: int) -> np.ndarray | None:
        """[vocab] after `depth` tokens beyond the output, which the matcher has read; None if the matcher fails there."""
        if depth < len(self._masks):
            return self._masks[depth]
        path = tuple(self._ahead)
        if self.failure or path in self._dead_ends:
            return None
        matcher = self._ready_matcher()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.zeros(self._vocab_size, dtype=bool)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(allowed)] = allowed
        reason = matcher.get_error() if matcher.is_error() else "no token can follow"
        if mask[self._all_ends].any() and not matcher.is_accepting():
            mask[self._all_ends] = False  # allowed as text, but it would end the output
            reason = reason if mask.any() else "it requires the text of an end token, which would end the output"
        if matcher.is_error() or not mask.any():
            self._matcher = None
            if depth:
                self._dead_ends[path] = reason
            else:
                self._fail(reason)
            return None
        self._masks.append(self._later(mask, depth))
        return self._masks[depth]

    def _ready_matcher(self) -> Matcher:
        """A matcher that has read the output and the tokens ahead; a new one if the last one failed."""
        if self._matcher is None:
            kept = self._kept.deep_copy()
            for token in self._output[self._num_kept :]:
                kept.consume_token(token)
            self._kept, self._num_kept = kept, len(self._output)
            self._matcher = kept.deep_copy()
            for token in self._ahead:
                self._matcher.consume_token(token)
        return self._matcher

    def _later(self, mask: np.ndarray, depth: int) -> np.ndarray:
        """The mask without held-back tokens, unless nothing would be left."""
        held = self._early if len(self._output) + depth < self._min_tokens else self._ends
        if not len(held):
            return mask
        without = mask.copy()
        without[held] = False
        return without if without.any() else mask

    def _fail(self, reason: str) -> None:
        # The library appends its internal state, which is long.
        self.failure = self.failure or (reason.splitlines() or ["no token can follow"])[0][:200]


class StepGrammars:
    """The grammars of a batch for one step. states: one per row, None for rows without a grammar."""

    def __init__(self, states: Sequence[GrammarState | None]) -> None:
        self._rows = [(at, state) for at, state in enumerate(states) if state is not None]
        for _, state in self._rows:
            state.rewind()  # a step that failed may have read ahead

    def restrict(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int, caps: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices [m] of the rows that have a grammar, and their logits, with -inf for forbidden tokens.

        logits: [n, columns, vocab] of the first n rows. Column c follows the row's output and its first `first + c` draft
        tokens. draft_ids: [n, >= first + columns - 1]; caps: [n], number of draft tokens that count, None for all.
        """
        present = [(at, state) for at, state in self._rows if at < len(logits)]
        rows = upload(np.array([at for at, _ in present], np.int64), logits.device)
        chosen = logits[rows].float()
        if not present:
            return rows, chosen
        drafts, columns = draft_ids[rows].tolist(), logits.shape[1]
        limits = [len(draft) for draft in drafts] if caps is None else caps[rows].tolist()
        forbidden = np.zeros(chosen.shape, dtype=bool)
        for at, (_, state) in enumerate(present):
            num_columns = min(columns, limits[at] + 1 - first)
            for column, mask in enumerate(state.masks(drafts[at], first, num_columns)):
                if mask is not None:
                    forbidden[at, column] = ~mask
        return rows, chosen.masked_fill_(upload(forbidden, logits.device), float("-inf"))
