"""Grammars as masks over the vocabulary, one for every position of a step, drafted ones included.

A mask is laid over the logits of draft and target alike, after the other edits and before temperature and truncation. So a
token that the grammar forbids is neither proposed nor accepted, and what comes out is the target's distribution restricted
at each token to what the grammar allows there: the same, whatever was drafted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from speclen.worker.models.upload import upload

SLOW_MASK_S = 0.002
MASK_SMOOTHING = 0.2  # weight of the newest


class Matcher(Protocol):
    """Reads one output against a grammar; llguidance's LLMatcher. After an error it stays in error."""

    def compute_bitmask(self) -> bytes:
        """One bit a token, the lowest first; end tokens are allowed where the output may end."""

    def consume_token(self, sampled_token: int) -> bool:
        """Read a token; True if it could follow."""

    def rollback(self, num_tokens: int) -> bool: ...

    def deep_copy(self) -> Matcher: ...

    def is_accepting(self) -> bool:
        """True if the output may end here."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class Grammar:
    """A grammar ready to be followed by any number of outputs. end_ids: tokens that end an output."""

    def __init__(self, matcher: Matcher, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)

    def start(self, held_back: Sequence[int] = (), min_tokens: int = 0, go_on: bool = False) -> GrammarState:
        """State of a new output.

        held_back: tokens that must not come before output position min_tokens, nor end tokens if go_on says so, unless
        the grammar allows nothing else.
        """
        return GrammarState(self._matcher, self._vocab_size, self._end_ids, held_back, min_tokens, go_on)


class GrammarState:
    """One output's place in its grammar, and the drafted tokens that are being looked at beyond it.

    matcher: at the grammar's beginning; it stays there. failure: why the grammar cannot be followed any further, "" while
    it can. A matcher that fails beyond the output is no failure, since the output may never come there: what is drafted
    there is not looked at, and another matcher is brought to the output's end.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        end_ids: Sequence[int],
        held_back: Sequence[int],
        min_tokens: int,
        go_on: bool,
    ) -> None:
        self.failure = ""
        self._matcher: Matcher | None = matcher.deep_copy()
        self._kept, self._num_kept = matcher, 0  # one that has read so many tokens of the output, for when that fails
        self._spent_s = 0.0
        self._mask_s = 0.0  # what one took, of late
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._early = np.array([*held_back], dtype=np.int64)  # not before min_tokens
        self._all_ends = np.array([*end_ids], dtype=np.int64)
        self._ends = self._all_ends if go_on else self._all_ends[:0]  # never
        self._min_tokens = min_tokens
        self._output: list[int] = []
        self._ahead: list[int] = []  # tokens beyond the output that the matcher has read
        self._masks: list[np.ndarray] = []  # [vocab] after the output and the first 0, 1, ... of these
        # Tokens beyond the output, the last of which the matcher cannot read, or after which it has no mask; and why.
        self._unreadable: dict[tuple[int, ...], str] = {}
        self._dead_ends: dict[tuple[int, ...], str] = {}

    def take_spent_s(self) -> float:
        """Seconds that its masks took since this was last asked."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    @property
    def is_slow(self) -> bool:
        """True if its masks take so long that none should be made in vain: all sequences wait for them."""
        return self._mask_s > SLOW_MASK_S

    def append(self, ids: Sequence[int]) -> int:
        """Move on by tokens that become output, an end token being the last; how many may. Fewer than all are a failure."""
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
        """Forget what was read beyond the output, but for its first tokens."""
        extra = len(self._ahead) - num_ahead
        if extra > 0:
            if self._matcher is not None:
                self._matcher.rollback(extra)
            del self._ahead[num_ahead:]
            del self._masks[num_ahead + 1 :]

    def masks(self, draft: Sequence[int], first: int, columns: int) -> list[np.ndarray | None]:
        """Masks after the output and the draft's first `first`, `first + 1`, ... tokens, for so many columns.

        None where an earlier token cannot come, so that the mask does not matter, and where it is not known.
        """
        began = time.perf_counter()
        try:
            return self._masks_of(draft, first, columns)
        finally:
            took_s = time.perf_counter() - began
            self._spent_s += took_s
            self._mask_s += MASK_SMOOTHING * (took_s / max(1, columns) - self._mask_s)

    def _masks_of(self, draft: Sequence[int], first: int, columns: int) -> list[np.ndarray | None]:
        found: list[np.ndarray | None] = []
        for depth in range(first + columns):
            if depth and not self._read(draft, depth - 1):
                return [*found[first:], *[None] * (first + columns - max(depth, first))]
            found.append(self._mask(depth))
        return found[first:]

    def _read(self, tokens: Sequence[int], at: int) -> bool:
        """Let the matcher read tokens[at], having read those before it; whether it may come and something may follow."""
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
        """[vocab] after `depth` tokens beyond the output, which the matcher has read; None where it fails there."""
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
            mask[self._all_ends] = False  # meant as text, but it would end the output
            reason = reason if mask.any() else "it wants the text of an end token, which would end the output"
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
        """A matcher that has read the output and what is looked at beyond it: another one if the last has failed."""
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
        """The mask without what is held back, unless nothing is left then."""
        held = self._early if len(self._output) + depth < self._min_tokens else self._ends
        if not len(held):
            return mask
        without = mask.copy()
        without[held] = False
        return without if without.any() else mask

    def _fail(self, reason: str) -> None:
        # The library's reason is followed by its state, which is long and nobody's business.
        self.failure = self.failure or (reason.splitlines() or ["it cannot go on"])[0][:200]


class StepGrammars:
    """The grammars of a batch for one step. states: one per row, None where everything is allowed."""

    def __init__(self, states: Sequence[GrammarState | None]) -> None:
        self._rows = [(at, state) for at, state in enumerate(states) if state is not None]
        for _, state in self._rows:
            state.rewind()  # a step that failed may have read on

    def restrict(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int, caps: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices [m] of the rows that have a grammar, and their logits, -inf where it forbids a token.

        logits: [n, columns, vocab] of the first n rows. Column c follows the row's output and its first `first + c` draft
        tokens. draft_ids: [n, >= first + columns - 1]; caps: [n], the draft tokens that count, None for all.
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
