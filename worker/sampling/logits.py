"""What penalties, logit bias and min_tokens do to logits, for rows that each have their own settings.

The same edits apply to draft and target, and every position sees the tokens before it, drafted ones included: so a
draft is judged by the distribution that the row would have had without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowEdits:
    """One row's settings, and the tokens it has seen.

    logit_bias: token to addend. forbidden: tokens that may not come before output position `min_tokens`.
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
        # Tensors from the start: a request may name the whole vocabulary, and every step looks at it.
        self.bias_ids = torch.tensor(list(logit_bias or ()), dtype=torch.long, device=device)
        self.bias = torch.tensor(list((logit_bias or {}).values()), dtype=torch.float32, device=device)
        self.forbidden = torch.tensor(list(forbidden) if min_tokens else [], dtype=torch.long, device=device)
        self.min_tokens = min_tokens
        self.penalises = (repetition_penalty, presence_penalty, frequency_penalty) != (1.0, 0.0, 0.0)
        if self.penalises:
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(prompt_ids, device=device)] = True
            self.counts = torch.zeros(vocab_size, device=device)

    def append(self, ids: Sequence[int]) -> None:
        """Count tokens that became output."""
        if self.penalises:
            added = torch.tensor(ids, dtype=torch.long, device=self.counts.device)  # of no tokens it would be of floats
            self.counts.index_add_(0, added, torch.ones(len(ids), device=self.counts.device))


class LogitEdits:
    """The edits of a batch for one step. rows: one entry per row, None where the logits stay as they are.

    positions: [rows], how many tokens each row has put out before the step.
    """

    def __init__(self, rows: Sequence[RowEdits | None], positions: torch.Tensor) -> None:
        self.positions = positions
        device = positions.device
        penalised = [(at, row) for at, row in enumerate(rows) if row is not None and row.penalises]
        self._penalised = torch.tensor([at for at, _ in penalised], dtype=torch.long, device=device)
        if penalised:
            self._counts = torch.stack([row.counts for _, row in penalised])
            self._in_prompt = torch.stack([row.in_prompt for _, row in penalised])
            settings = [(r.repetition_penalty, r.presence_penalty, r.frequency_penalty) for _, r in penalised]
            self._settings = torch.tensor(settings, device=device).T[:, :, None, None]
        present = [(at, row) for at, row in enumerate(rows) if row is not None]
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
        logits = logits.float().clone()
        n = len(logits)
        self._penalise(logits, draft_ids, first)
        if self._bias.numel():
            keep = self._bias_rows < n
            logits[self._bias_rows[keep], :, self._bias_ids[keep]] += self._bias[keep, None]
        if self._forbidden_ids.numel():
            keep = self._forbidden_rows < n
            row, token, until = self._forbidden_rows[keep], self._forbidden_ids[keep], self._until[keep]
            columns = first + torch.arange(logits.shape[1], device=logits.device)
            early = self.positions[row, None] + columns < until[:, None]
            logits[row, :, token] = logits[row, :, token].masked_fill(early, float("-inf"))
        return logits

    def _penalise(self, logits: torch.Tensor, draft_ids: torch.Tensor, first: int) -> None:
        keep = self._penalised < len(logits)
        rows = self._penalised[keep]
        if not rows.numel():
            return
        chosen = logits[rows]
        counts = self._counts[keep][:, None, :] + _drafted(draft_ids[rows], first, chosen.shape[1], chosen.shape[2])
        repetition, presence, frequency = self._settings[:, keep]
        seen = self._in_prompt[keep][:, None, :] | (counts > 0)
        repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(seen, repeated, chosen)
        logits[rows] = chosen - presence * (counts > 0) - frequency * counts


def _drafted(draft_ids: torch.Tensor, first: int, columns: int, vocab_size: int) -> torch.Tensor:
    """[rows, columns, vocab]: how often each token is among the first `first + column` draft tokens."""
    rows = len(draft_ids)
    counts = torch.zeros(rows, columns, vocab_size, device=draft_ids.device)
    ids = draft_ids[:, : first + columns - 1]
    if ids.shape[1]:
        # Draft token t counts from the first column that follows it.
        column = (torch.arange(ids.shape[1], device=ids.device) + 1 - first).clamp_min(0).expand_as(ids)
        row = torch.arange(rows, device=ids.device)[:, None].expand_as(ids)
        counts.index_put_((row, column, ids), torch.ones_like(ids, dtype=counts.dtype), accumulate=True)
    return counts.cumsum(1)
