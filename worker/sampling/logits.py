"""Edits of logits: penalties, logit bias and min_tokens, with settings of its own for each sequence.

The same edits apply to draft and target. At every position they take the tokens before it into account, including draft
tokens. So a draft is verified against the distribution that the sequence would have without speculation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from speclen.worker.models.devices import upload


class RowEdits:
    """Settings of one sequence, and its token counts.

    logit_bias: from token to addend. forbidden: tokens that are not allowed before output position `min_tokens`.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        prompt_ids: Sequence[int],
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        forbidden: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.repetition_penalty = repetition_penalty
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty
        # Tensors, not dictionaries: every step reads them, and a request may name the whole vocabulary.
        self.bias_ids = upload(np.array(list(logit_bias or ()), np.int64), device)
        self.bias = upload(np.array(list((logit_bias or {}).values()), np.float32), device)
        self.forbidden = upload(np.array(forbidden if min_tokens else (), np.int64), device)
        self.min_tokens = min_tokens
        self.penalises = (repetition_penalty, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0)
        if self.penalises:
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[upload(np.array(prompt_ids, np.int64), device)] = True
            self.counts = torch.zeros(vocab_size, device=device)
            self.uncounted: list[int] = []  # output tokens that are not in the counts yet

    def append(self, ids: Sequence[int]) -> None:
        """Count output tokens."""
        if self.penalises:
            self.uncounted += ids


class LogitEdits:
    """The edits of a batch for one step. rows: one entry per row, None if its logits are not edited.

    positions: [rows], number of output tokens of each row before the step.
    """

    def __init__(self, rows: Sequence[RowEdits | None], positions: torch.Tensor) -> None:
        self.positions = positions
        device = positions.device
        penalised = [(at, row) for at, row in enumerate(rows) if row is not None and row.penalises]
        # On the host as well, in ascending order, so that a slice for the first rows needs no synchronisation.
        self._penalised = np.array([at for at, _ in penalised], np.int64)
        if penalised:
            self._penalised_rows = upload(self._penalised, device)
            self._counts = _counts([row for _, row in penalised])
            self._in_prompt = torch.stack([row.in_prompt for _, row in penalised])
            settings = [(r.repetition_penalty, r.presence_penalty, r.frequency_penalty) for _, r in penalised]
            self._settings = upload(np.array(settings, np.float32), device).T[:, :, None, None]
        present = [(at, row) for at, row in enumerate(rows) if row is not None]
        self._present = [at for at, _ in present]
        self._num_biased = list(accumulate((len(row.bias_ids) for _, row in present), initial=0))
        self._num_forbidden = list(accumulate((len(row.forbidden) for _, row in present), initial=0))
        none = torch.empty(0, dtype=torch.long, device=device)
        self._bias_rows = torch.cat([none, *(torch.full_like(row.bias_ids, at) for at, row in present)])
        self._bias_ids = torch.cat([none, *(row.bias_ids for _, row in present)])
        self._bias = torch.cat([none.float(), *(row.bias for _, row in present)])
        self._forbidden_rows = torch.cat([none, *(torch.full_like(row.forbidden, at) for at, row in present)])
        self._forbidden_ids = torch.cat([none, *(row.forbidden for _, row in present)])
        self._until = torch.cat([none, *(torch.full_like(row.forbidden, row.min_tokens) for _, row in present)])

    def apply(self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int) -> torch.Tensor:
        """Edited logits, float32. logits: [n, columns, vocab] of the first n rows.

        Column c follows the row's output and its first `first + c` draft tokens. draft_ids: [n, >= first + columns - 1].
        """
        logits = logits.to(torch.float32, copy=True)
        self._penalise(logits, draft_ids, first)
        present = bisect_left(self._present, len(logits))
        if biased := self._num_biased[present]:
            logits[self._bias_rows[:biased], :, self._bias_ids[:biased]] += self._bias[:biased, None]
        if count := self._num_forbidden[present]:
            row, token, until = self._forbidden_rows[:count], self._forbidden_ids[:count], self._until[:count]
            columns = first + torch.arange(logits.shape[1], device=logits.device)
            early = self.positions[row, None] + columns < until[:, None]
            logits[row, :, token] = logits[row, :, token].masked_fill(early, float("-inf"))
        return logits

    def _penalise(self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int) -> None:
        count = int(self._penalised.searchsorted(len(logits)))
        if not count:
            return
        rows = self._penalised_rows[:count]
        chosen = logits[rows]
        counts = _drafted(draft_ids[rows], first, chosen.shape[1], chosen.shape[2]).add_(self._counts[:count, None])
        repetition, presence, frequency = self._settings[:, :count]
        in_output = counts > 0
        # In place, since with a large vocabulary these are the largest tensors of a step.
        factor = torch.where(chosen > 0, 1 / repetition, repetition)
        chosen.mul_(factor.masked_fill_(~(in_output | self._in_prompt[:count, None]), 1.0))
        del factor
        logits[rows] = chosen.sub_(counts.mul_(frequency)).sub_(presence * in_output)


def _counts(rows: Sequence[RowEdits]) -> torch.Tensor:
    """[rows, vocab]: counts of tokens in the rows' output, with the uncounted ones added."""
    counts = torch.stack([row.counts for row in rows])
    places = [at * counts.shape[1] + token for at, row in enumerate(rows) for token in row.uncounted]
    added = torch.ones(len(places), device=counts.device)
    counts.view(-1).index_add_(0, upload(np.array(places, np.int64), counts.device), added)
    for row, own in zip(rows, counts, strict=True):
        row.counts, row.uncounted = own, []
    return counts


def _drafted(draft_ids: torch.Tensor, first: int, columns: int, vocab_size: int) -> torch.Tensor:
    """[rows, columns, vocab]: counts of tokens among the first `first + column` draft tokens."""
    rows = len(draft_ids)
    counts = torch.zeros(rows, columns, vocab_size, device=draft_ids.device)
    ids = draft_ids[:, : first + columns - 1]
    if ids.shape[1]:
        # Draft token t counts from the first column after it.
        column = (torch.arange(ids.shape[1], device=ids.device) + 1 - first).clamp_min(0).expand_as(ids)
        row = torch.arange(rows, device=ids.device)[:, None].expand_as(ids)
        counts.index_put_((row, column, ids), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)
    return counts.cumsum_(1)
