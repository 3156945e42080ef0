"""The rule by which the sequences of a batch choose tokens, on any device. `host` has a faster one in numpy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from speclen.worker.models.devices import upload
from speclen.worker.sampling import noise
from speclen.worker.sampling.grammar import GrammarState, StepGrammars
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

# With top-k or top-p a draft token is drawn from this many of the most likely tokens, since sorting a vocabulary of 128k
# takes longer than a pass of the draft model. Verification uses the same distribution, so outputs do not depend on it.
DRAFT_CANDIDATES = 64


@dataclass(slots=True)
class RowSampling:
    """Sampling settings of one sequence. key: of `noise`; set if its tokens must not depend on the rest of the batch."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: int | None = None
    edits: RowEdits | None = None
    grammar: GrammarState | None = None

    @property
    def is_unrestricted(self) -> bool:
        """True without penalties, grammar and truncation: greedy, or any token may be drawn."""
        return not self.looks_back and (self.temperature == 0 or not self.is_truncated)

    @property
    def is_truncated(self) -> bool:
        """True if top-k, top-p or min-p exclude unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def looks_back(self) -> bool:
        """True if penalties or a grammar make the next token depend on earlier ones in another way than by the model."""
        return self.edits is not None or self.grammar is not None


class TokenRule(Protocol):
    """Chooses draft tokens and decides which are accepted. One object per step; one call of `propose` per draft token."""

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft tokens [n] for the first n rows. logits: [n, 1, vocab]; draft_ids: [n, tokens drafted so far]."""

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted lengths [rows], and tokens [rows, k + 1]: the first accepted + 1 tokens of a row are its output.

        The length is -1 for a row without a token, since its logits are NaN or infinite: see `cut_at_broken`. logits:
        [rows, k + 1, vocab] of the target; draft_ids: [rows, k]; caps: [rows], proposed tokens per row; None for k.
        """


class RowGroup:
    """Those rows of a batch, ascending, that choose tokens in the same way."""

    def __init__(self, chosen: Sequence[bool], device: torch.device) -> None:
        self._rows = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        self.has_all = len(self._rows) == len(chosen)
        self._index = upload(np.array(self._rows, np.int64), device)

    def among(self, num_rows: int) -> torch.Tensor | slice | None:
        """Index of the group's rows among the first num_rows of the batch: a slice if all are, None if none is."""
        if self.has_all:
            return slice(num_rows)
        count = bisect_left(self._rows, num_rows)
        return self._index[:count] if count else None


class BatchSampling:
    """Sampling settings of a batch as tensors. Made once per change of the batch."""

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
        # A row is greedy, seeded or unseeded, and each kind has its own rule. Greedy rows need no noise.
        self.seeded = group(lambda row: row.temperature > 0 and row.key is not None)
        self.unseeded = group(lambda row: row.temperature > 0 and row.key is None)
        self.all_greedy, self.all_unseeded = all(row.temperature == 0 for row in rows), self.unseeded.has_all
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
        """The rows' grammars, for one step; None if no row has one."""
        return StepGrammars([row.grammar for row in self.rows]) if self.has_grammars else None

    def scaled(self, logits: torch.Tensor, candidates: int | None = None) -> torch.Tensor:
        """Logits [n, columns, vocab] of the first n rows, divided by temperature; -inf for tokens that must not be drawn.

        The logits of greedy rows are not changed. float32 unless all rows are greedy. candidates: as for `truncate_`.
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
    """A `TokenRule` for all kinds of rows. See `verification` for the two rules of acceptance.

    positions: [rows], number of output tokens of each row before the step, on which noise and min_tokens depend.
    num_ngrams: [rows], n-gram tokens in each row's proposal, which precede draft tokens and were not drawn; None for none.
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
        self._draft_probs: list[torch.Tensor] = []  # by column: [unseeded rows among the first ones, vocab]

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        column = draft_ids.shape[1]
        scaled = self._scaled(logits, draft_ids, column, candidates=DRAFT_CANDIDATES)
        ids = self._choose(scaled, column, self._num_ngrams)[:, 0]
        unseeded = self.batch.unseeded.among(len(logits))
        if unseeded is not None:
            probs = torch.softmax(scaled[unseeded, 0], dim=-1)
            self._draft_probs.append(probs)
            ids[unseeded] = choose(probs, noise.fresh(probs, self.generator))
        return ids

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = self._scaled(logits, draft_ids, 0, caps)
        tokens = self._choose(scaled, 0, None)
        num_accepted = accept_matching(draft_ids, tokens, caps)
        unseeded = self.batch.unseeded.among(len(logits))
        if unseeded is not None:
            probs = torch.softmax(scaled[unseeded], dim=-1)
            del scaled
            proposed, limits = draft_ids[unseeded], None if caps is None else caps[unseeded]
            accepted, following = verify(
                probs, self._drafted(probs, proposed, unseeded), proposed, limits, self.generator
            )
            tokens[unseeded] = torch.nn.functional.pad(proposed, (0, 1)).scatter_(
                1, accepted[:, None], following[:, None]
            )
            num_accepted[unseeded] = accepted
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
        """Tokens [n, columns] of greedy and seeded rows; arbitrary ones for unseeded rows.

        first: place of the first column after the output. num_ngrams: n-gram tokens of each row before that column.
        """
        if self.batch.all_unseeded:
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

    def _drafted(self, probs: torch.Tensor, draft_ids: torch.Tensor, unseeded: torch.Tensor | slice) -> torch.Tensor:
        """Draft distributions [rows, k, vocab] of unseeded rows: 0 if nothing was drafted, one-hot at an n-gram token.

        So an n-gram token is accepted with the target's probability of it. After a rejection, the next token is drawn from
        the target's distribution without it.
        """
        rows, columns, vocab_size = probs.shape
        drafted = probs.new_zeros(rows, columns - 1, vocab_size)
        if self._num_ngrams is None:
            for column, column_probs in enumerate(self._draft_probs):
                drafted[: len(column_probs), column] = column_probs
            return drafted
        # No index depends on values on the device, or the host would have to wait for them.
        every, num_ngrams = torch.arange(rows, device=probs.device), self._num_ngrams[unseeded]
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
    """Distributions [n, vocab] from which a row that is not greedy draws, given logits [n, vocab]."""
    return BatchSampling([row], logits.device).distribution(logits[None], candidates)[0]
