"""A transformers model together with the pool that holds its rows' keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from worker.attention import RowAttention, StepMasks
from worker.kv_cache import KVPool


class CachedModel:
    """Runs a model over rows of its pool: prompts through `prefill`, decoding passes through `forward`.

    max_context_length: positions beyond it are clamped, since models with learned positions have no others; whatever
    is computed there is thrown away by the caller.
    """

    def __init__(self, model: Any, pool: KVPool, max_context_length: int) -> None:
        self.model = model
        self.pool = pool
        self.max_context_length = max_context_length
        self.num_recorded = 0  # passes recorded so far, see CapturedModel
        self._slices_itself = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, ids: torch.Tensor, attention: RowAttention, num_logits: int) -> torch.Tensor:
        """Logits [rows, num_logits, vocab] of the last positions, valid until the next call.

        ids: [rows, queries], at attention.positions.
        """
        return self.plain_forward(ids, attention, num_logits)

    def plain_forward(self, ids: torch.Tensor, attention: RowAttention, num_logits: int) -> torch.Tensor:
        """As forward, never recorded; the logits stay."""
        options = {"logits_to_keep": num_logits} if self._slices_itself else {}
        output = self.model(
            input_ids=ids,
            position_ids=attention.positions.clamp(max=self.max_context_length - 1),
            use_cache=False,
            row_attention=attention,
            **options,
        )
        return output.logits[:, -num_logits:]

    def prefill(self, row: int, ids: Sequence[int], start: int) -> torch.Tensor:
        """Feed one row's tokens start, start + 1, ...; returns the logits [1, 1, vocab] that follow the last one."""
        device, end = self.pool.device, start + len(ids)
        positions = torch.arange(start, end, device=device)[None]
        masks = StepMasks(positions, end, self.pool.dtype)
        attention = RowAttention(self.pool, masks, slice(None), first_row=row, start=start)
        logits = self.plain_forward(torch.tensor([ids], device=device), attention, num_logits=1)
        self.pool.note_written(row, end)
        return logits
