"""The rule by which a batch chooses tokens, on any device; `host` has one for numpy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from speclen.worker.models.upload import upload
from speclen.worker.sampling import noise
from speclen.worker.sampling.host import MIN_TEMPERATURE, HostSettings
from speclen.worker.sampling.logits import LogitEdits, RowEdits
from speclen.worker.sampling.verification import (
    accept_matching,
    choose,
    cut_at_broken,
    most_likely,
    truncate_,
    verify,
)
from speclen.worker.structured.grammar import GrammarState, StepGrammars

# Most likely tokens among which a draft is drawn where top-k or top-p asks for the likely ones: to sort a vocabulary of 128k
# takes longer than a draft model's pass. Verification uses the same distribution, so outputs do not depend on it.
DRAFT_CANDIDATES = 64


@dataclass(slots=True)
class RowSampling:
    """One row's settings. key: of `noise`, set when the row's tokens must not depend on the rest of the batch."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: int | None = None
    edits: RowEdits | None = None
    grammar: GrammarState | None = None

    @property
    def is_unrestricted(self) -> bool:
        """True without edits, grammar and truncation: greedy, or all tokens at the temperature's probability."""
        return not self.looks_back and (self.temperature == 0 or not self.is_truncated)

    @property
    def is_truncated(self) -> bool:
        """True if unlikely tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def looks_back(self) -> bool:
        """True if edits or a grammar make the next token depend on the earlier ones, beyond the model's own logits."""
        return self.edits is not None or self.grammar is not None


class TokenRule(Protocol):
    """Proposes draft tokens and decides which stay. One object per step; `propose` is called for columns 0, 1, ..."""

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft tokens [n] for the first n rows. logits: [n, 1, vocab]; draft_ids: [n, tokens drafted so far]."""

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted lengths [rows], and tokens [rows, k + 1] of which row r's first accepted + 1 are its output.

        The length is -1 for a row that gets no token, since its logits are NaN or infinite: see `cut_at_broken`.
        logits: [rows, k + 1, vocab] of the target; draft_ids: [rows, k]; caps: [rows] or None for k.
        """


class RowGroup:
    """Rows of a batch, ascending, that choose tokens alike."""

    def __init__(self, chosen: Sequence[bool], device: torch.device) -> None:
        self._rows = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        self.has_all = len(self._rows) == len(chosen)
        self._index = upload(np.array(self._rows, np.int64), device)

    def among(self, num_rows: int) -> torch.Tensor | slice | None:
        """Index of those among the first rows of the batch: a slice if all of them are, None if none is."""
        if self.has_all:
            return slice(num_rows)
        count = bisect_left(self._rows, num_rows)
        return self._index[:count] if count else None


class BatchSampling:
    """Settings of a batch's rows as tensors; made once for every change of the batch."""

    def __init__(self, rows: Sequence[RowSampling], device: torch.device) -> None:
        def column(values: Sequence[float], dtype: type = np.float32) -> torch.Tensor:
            return upload(np.array(values, dtype), device)

        def group(chosen: Callable[[RowSampling], bool]) -> RowGroup:
            return RowGroup([chosen(row) for row in rows], device)

        self.rows = rows
        self.device = device
        self.factor = column([1 / max(row.temperature, MIN_TEMPERATURE) if row.temperature else 1.0 for row in rows])
        self.top_k = column([row.top_k for row in rows], np.int64) if any(row.top_k for row in rows) else None
        self.top_p = column([row.top_p for row in rows]) if any(row.top_p < 1 for row in rows) else None
        self.min_p = column([row.min_p for row in rows]) if any(row.min_p > 0 for row in rows) else None
        self.keys = column([row.key or 0 for row in rows], np.int64)
        # By the rule that fits it, a row is greedy, seeded or drawn. Greedy rows have no randomness to reproduce.
        self.seeded = group(lambda row: row.temperature > 0 and row.key is not None)
        self.drawn = group(lambda row: row.temperature > 0 and row.key is None)
        self.all_greedy, self.all_drawn = all(row.temperature == 0 for row in rows), self.drawn.has_all
        self.truncated = group(lambda row: row.temperature > 0 and row.is_truncated)
        self.has_edits = any(row.edits is not None for row in rows)
        self.has_grammars = any(row.grammar is not None for row in rows)
        self.on_host = device.type == "cpu" and all(row.is_unrestricted for row in rows)

    @cached_property
    def for_host(self) -> HostSettings:
        """The same for HostRule, of rows that are `on_host`."""
        temperatures, seeded = zip(*((row.temperature, row.key is not None) for row in self.rows), strict=True)
        return HostSettings(np.array(temperatures), self.keys.numpy(), np.array(seeded))

    def grammars(self) -> StepGrammars | None:
        """Those of the rows, for one step; None where no row has any."""
        return StepGrammars([row.grammar for row in self.rows]) if self.has_grammars else None

    def scaled(self, logits: torch.Tensor, candidates: int | None = None) -> torch.Tensor:
        """Logits [n, columns, vocab] of the first n rows by their temperatures; -inf where not to be drawn.

        Those of greedy rows stay as they are. In float32 unless all are. candidates: as `truncate_`.
        """
        num_rows = len(logits)
        if self.all_greedy:
            return logits
        scaled = logits * self.factor[:num_rows, None, None]
        at = self.truncated.among(num_rows)
        if at is not None:
            part = scaled[at]
            top_k, top_p, min_p = (None if one is None else one[at] for one in (self.top_k, self.top_p, self.min_p))
            truncate_(part, top_k, top_p, min_p, candidates)
            if not isinstance(at, slice):
                scaled[at] = part
        return scaled

    def distribution(self, logits: torch.Tensor, candidates: int | None = None) -> torch.Tensor:
        """Probabilities of the first len(logits) rows, none of them greedy."""
        return torch.softmax(self.scaled(logits, candidates), dim=-1)


class SamplingRule:
    """Rows with and without randomness, each by the rule that fits it; see `verification` for the two rules.

    positions: [rows], output tokens of each row before the step: noise and min_tokens depend on the output position.
    num_ngrams: [rows], n-gram tokens of each row's proposal, which precede draft tokens and were not drawn; None for none.
    """

    def __init__(
        self,
        batch: BatchSampling,
        positions: torch.Tensor,
        generator: torch.Generator | None,
        num_ngrams: torch.Tensor | None = None,
    ) -> None:
        self._num_ngrams = num_ngrams
        self.batch = batch
        self.positions = positions
        self.generator = generator
        self.edits = LogitEdits([row.edits for row in batch.rows], positions) if batch.has_edits else None
        self.grammars = batch.grammars()
        self._draft_probs: list[torch.Tensor] = []  # by column, [those of the first rows that are drawn, vocab]

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        column = draft_ids.shape[1]
        scaled = self._scaled(logits, draft_ids, column, candidates=DRAFT_CANDIDATES)
        ids = self._choose(scaled, column, self._num_ngrams)[:, 0]
        drawn = self.batch.drawn.among(len(logits))
        if drawn is not None:
            probs = torch.softmax(scaled[drawn, 0], dim=-1)
            self._draft_probs.append(probs)
            ids[drawn] = choose(probs, noise.fresh(probs, self.generator))
        return ids

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = self._scaled(logits, draft_ids, 0, caps)
        tokens = self._choose(scaled, 0, None)
        num_accepted = accept_matching(draft_ids, tokens, caps)
        drawn = self.batch.drawn.among(len(logits))
        if drawn is not None:
            probs = torch.softmax(scaled[drawn], dim=-1)
            del scaled
            proposed, limits = draft_ids[drawn], None if caps is None else caps[drawn]
            accepted, following = verify(probs, self._drafted(probs, proposed, drawn), proposed, limits, self.generator)
            tokens[drawn] = torch.nn.functional.pad(proposed, (0, 1)).scatter_(1, accepted[:, None], following[:, None])
            num_accepted[drawn] = accepted
        return cut_at_broken(num_accepted, logits), tokens

    def _scaled(
        self,
        logits: torch.Tensor,
        draft_ids: torch.Tensor,
        first: int,
        caps: torch.Tensor | None = None,
        candidates: int | None = None,
    ) -> torch.Tensor:
        if self.edits is not None:
            logits = self.edits.apply(logits, draft_ids, first)
        if self.grammars is not None:
            rows, restricted = self.grammars.restrict(logits, draft_ids, first, caps)
            logits = logits.to(torch.float32, copy=True).index_copy_(0, rows, restricted)
        return self.batch.scaled(logits, candidates)

    def _choose(self, scaled: torch.Tensor, first: int, num_ngrams: torch.Tensor | None) -> torch.Tensor:
        """Tokens [n, columns] of greedy and seeded rows; any of the others.

        first: column of the first; num_ngrams: of each row, before that column.
        """
        if self.batch.all_drawn:
            return torch.zeros(scaled.shape[:2], dtype=torch.long, device=scaled.device)
        ids = most_likely(scaled)
        seeded = self.batch.seeded.among(len(scaled))
        if seeded is not None:
            positions = self.positions if num_ngrams is None else self.positions + num_ngrams
            columns = torch.arange(first, first + scaled.shape[1], device=scaled.device)
            exponential = noise.exponential(
                self.batch.keys[seeded], positions[seeded, None] + columns, scaled.shape[-1]
            )
            ids[seeded] = choose(torch.softmax(scaled[seeded], dim=-1), exponential)
        return ids

    def _drafted(self, probs: torch.Tensor, draft_ids: torch.Tensor, drawn: torch.Tensor | slice) -> torch.Tensor:
        """Draft distributions [rows, k, vocab] of drawn rows: 0 where nothing was drafted; n-gram tokens have all of 1.

        So an n-gram token is accepted with the target's own probability of it, and after a rejection the target's
        distribution is left without it.
        """
        rows, columns, vocab_size = probs.shape
        drafted = probs.new_zeros(rows, columns - 1, vocab_size)
        if self._num_ngrams is None:
            for column, column_probs in enumerate(self._draft_probs):
                drafted[: len(column_probs), column] = column_probs
            return drafted
        # No index depends on values of the device, for which the host would have to wait.
        every, num_ngrams = torch.arange(rows, device=probs.device), self._num_ngrams[drawn]
        for column, column_probs in enumerate(self._draft_probs):
            places = num_ngrams[: len(column_probs)] + column
            at = every[: len(column_probs)], places.clamp(max=columns - 2)
            drafted[at] = torch.where(places[:, None] < columns - 1, column_probs, drafted[at])
        found = (torch.arange(columns - 1, device=probs.device) < num_ngrams[:, None])[:, :, None]
        return drafted.scatter_add_(-1, draft_ids[:, :, None], found.to(drafted.dtype))


def choices_of(row: RowSampling, logits: torch.Tensor, first: int, candidates: int | None = None) -> torch.Tensor:
    """Tokens [n] that a greedy row, or one with a seed, chooses one after the other by these logits, [n, vocab].

    first: its output tokens before the first of them. candidates: as `truncate_`. For a row that does not look back.
    """
    if row.temperature == 0:
        return most_likely(logits)
    assert row.key is not None
    positions = torch.arange(first, first + len(logits), device=logits.device)[None]
    key = torch.tensor([row.key], device=logits.device)
    return choose(distributions_of(row, logits, candidates), noise.exponential(key, positions, logits.shape[-1])[0])


def distributions_of(row: RowSampling, logits: torch.Tensor, candidates: int | None = None) -> torch.Tensor:
    """Probabilities [n, vocab] that one row, which is not greedy, draws from by these logits, [n, vocab]."""
    return BatchSampling([row], logits.device).distribution(logits[None], candidates)[0]
