"""Rules by which a batch chooses tokens: the greedy one, and one for batches in which any row samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from speclen.worker.models.upload import upload
from speclen.worker.sampling import noise
from speclen.worker.sampling.host import HostSettings
from speclen.worker.sampling.logits import LogitEdits, RowEdits
from speclen.worker.sampling.verification import (
    accept_matching,
    choose,
    cut_at_broken,
    distribution,
    most_likely,
    verify,
)
from speclen.worker.structured.grammar import GrammarState, StepGrammars


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
    def is_plain_greedy(self) -> bool:
        """True if the token is the largest allowed logit."""
        return self.temperature == 0 and self.edits is None

    @property
    def is_unrestricted(self) -> bool:
        """True without edits, grammar and truncation: greedy, or all tokens at the temperature's probability."""
        every = self.top_k == 0 and self.top_p >= 1 and self.min_p <= 0
        return not self.looks_back and (self.temperature == 0 or every)

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


class GreedyRule:
    """Every row takes the most likely token, without sampling work. grammars: of rows that have one."""

    def __init__(self, grammars: StepGrammars | None = None) -> None:
        self._grammars = grammars

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        return self._most_likely(logits, draft_ids, draft_ids.shape[1])[:, 0]

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target_ids = self._most_likely(logits, draft_ids, 0, caps)
        return cut_at_broken(accept_matching(draft_ids, target_ids, caps), logits), target_ids

    def _most_likely(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int, caps: torch.Tensor | None = None
    ) -> torch.Tensor:
        ids = most_likely(logits)
        if self._grammars is not None:
            rows, restricted = self._grammars.restrict(logits, draft_ids, first, caps)
            ids[rows] = most_likely(restricted)
        return ids


class BatchSampling:
    """Settings of a batch's rows as tensors; made once for every change of the batch."""

    def __init__(self, rows: Sequence[RowSampling], device: torch.device) -> None:
        def column(values: Sequence[float], dtype: type = np.float32) -> torch.Tensor:
            return upload(np.array(values, dtype), device)

        self.rows = rows
        self.device = device
        self.is_plain_greedy = all(row.is_plain_greedy for row in rows)
        self.temperature = column([row.temperature for row in rows])
        self.top_k = column([row.top_k for row in rows], np.int64) if any(row.top_k for row in rows) else None
        self.top_p = column([row.top_p for row in rows]) if any(row.top_p < 1 for row in rows) else None
        self.min_p = column([row.min_p for row in rows]) if any(row.min_p > 0 for row in rows) else None
        self.keys = column([row.key or 0 for row in rows], np.int64)
        seeded = [row.key is not None for row in rows]
        # Greedy rows have no randomness to reproduce: both rules give them the same tokens.
        matching = [row.key is not None or row.temperature == 0 for row in rows]
        self.seeded, self.matching = column(seeded, np.bool_), column(matching, np.bool_)
        self.any_matching, self.all_matching = any(matching), all(matching)
        self.has_edits = any(row.edits is not None for row in rows)
        self.has_grammars = any(row.grammar is not None for row in rows)
        self.on_host = device.type == "cpu" and all(row.is_unrestricted for row in rows)

    @cached_property
    def for_host(self) -> HostSettings:
        """The same for HostRule, of rows that are `on_host`."""
        return HostSettings(self.temperature.numpy(), self.keys.numpy(), self.seeded.numpy())

    def grammars(self) -> StepGrammars | None:
        """Those of the rows, for one step; None where no row has any."""
        return StepGrammars([row.grammar for row in self.rows]) if self.has_grammars else None

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of the first len(logits) rows."""
        n, cuts = len(logits), (self.top_k, self.top_p, self.min_p)
        return distribution(logits, self.temperature[:n], *(None if one is None else one[:n] for one in cuts))


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
        self._draft_probs: list[torch.Tensor] = []

    def propose(self, logits: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        column = draft_ids.shape[1]
        probs = self._probs(logits, draft_ids, column)
        self._draft_probs.append(probs)
        first = column if self._num_ngrams is None else column + self._num_ngrams[: len(probs), None]
        return choose(probs, self._noise(probs, first))[:, 0]

    def decide(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_accepted, tokens = self._decide(self._probs(logits, draft_ids, 0, caps), draft_ids, caps)
        return cut_at_broken(num_accepted, logits), tokens

    def _decide(
        self, probs: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batch.all_matching:
            return self._match(probs, draft_ids, caps)
        num_accepted, following = verify(probs, self._drafted(probs, draft_ids), draft_ids, caps, self.generator)
        tokens = torch.nn.functional.pad(draft_ids, (0, 1)).scatter_(1, num_accepted[:, None], following[:, None])
        if not self.batch.any_matching:
            return num_accepted, tokens
        num_matched, target_ids = self._match(probs, draft_ids, caps)
        matching = self.batch.matching
        return torch.where(matching, num_matched, num_accepted), torch.where(matching[:, None], target_ids, tokens)

    def _match(
        self, probs: torch.Tensor, draft_ids: torch.Tensor, caps: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target_ids = choose(probs, self._noise(probs, 0))
        return accept_matching(draft_ids, target_ids, caps), target_ids

    def _probs(
        self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int, caps: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.edits is not None:
            logits = self.edits.apply(logits, draft_ids, first)
        if self.grammars is not None:
            rows, restricted = self.grammars.restrict(logits, draft_ids, first, caps)
            logits = logits.float().index_copy(0, rows, restricted)
        return self.batch.distribution(logits)

    def _noise(self, probs: torch.Tensor, first: int | torch.Tensor) -> torch.Tensor:
        """Exp(1) noise like probs, whose first column is `first` (or [rows, 1]) tokens after the row's output."""
        rows, columns, vocab_size = probs.shape
        keys, seeded = self.batch.keys[:rows], self.batch.seeded[:rows]
        if not self.batch.all_matching:
            # Rows without a seed get a key for this call alone, which takes a fraction of torch's own exponential_.
            fresh = torch.empty_like(keys).random_(generator=self.generator)
            keys = torch.where(seeded, keys, fresh)
        positions = self.positions[:rows, None] + first + torch.arange(columns, device=probs.device)
        return noise.exponential(keys, positions, vocab_size)

    def _drafted(self, probs: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft distributions [rows, k, vocab] of all rows: 0 for rows that drafted nothing; n-gram tokens have all of 1.

        So an n-gram token is accepted with the target's own probability of it, and after a rejection the target's
        distribution is left without it.
        """
        rows, columns, vocab_size = probs.shape
        drafted = probs.new_zeros(rows, columns - 1, vocab_size)
        if self._num_ngrams is None:
            for column, column_probs in enumerate(self._draft_probs):
                drafted[: len(column_probs), column] = column_probs[:, 0]
            return drafted
        # No index depends on values of the device, for which the host would have to wait.
        every = torch.arange(rows, device=probs.device)
        for column, column_probs in enumerate(self._draft_probs):
            places = self._num_ngrams[: len(column_probs)] + column
            at = every[: len(column_probs)], places.clamp(max=columns - 2)
            drafted[at] = torch.where(places[:, None] < columns - 1, column_probs[:, 0], drafted[at])
        found = (torch.arange(columns - 1, device=probs.device) < self._num_ngrams[:, None])[:, :, None]
        return drafted.scatter_add_(-1, draft_ids[:, :, None], found.to(drafted.dtype))


def choices_of(row: RowSampling, logits: torch.Tensor, first: int) -> torch.Tensor:
    """Tokens [n] that a greedy row, or one with a seed, chooses one after the other by these logits, [n, vocab].

    first: its output tokens before the first of them. For a row that does not look back.
    """
    if row.temperature == 0:
        return most_likely(logits)
    assert row.key is not None
    positions = torch.arange(first, first + len(logits), device=logits.device)[None]
    key = torch.tensor([row.key], device=logits.device)
    return choose(distributions_of(row, logits), noise.exponential(key, positions, logits.shape[-1])[0])


def distributions_of(row: RowSampling, logits: torch.Tensor) -> torch.Tensor:
    """Probabilities [n, vocab] that one row draws from by these logits, [n, vocab]."""
    return BatchSampling([row], logits.device).distribution(logits[None])[0]
