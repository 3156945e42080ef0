"""A transformers model together with the pool that holds its rows' keys and values: the passes of torch, on any device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from speclen.worker.backends.attention import PackedAttention, RowAttention, StepMasks
from speclen.worker.backends.kv_cache import KVPool
from speclen.worker.backends.passes import PassPart, RaggedPart, equal_parts

# Packed passes are filled up to a multiple of so many tokens. Prompts have all lengths, and on a CPU a matrix product
# of a new size takes a millisecond longer the first time and keeps its kernel: the memory grew by 150 MB.
TOKENS_MULTIPLE = 16


class CachedModel:
    """Runs a model over rows of its pool: a `PassModel`.

    max_context_length: positions beyond it are clamped, since models with learned positions have no others; whatever
    is computed there is thrown away by the caller.
    """

    ragged = False
    slow_changes = False

    def __init__(self, model: Any, pool: KVPool, max_context_length: int) -> None:
        self.model = model
        self.pool = pool
        self.device = pool.device
        self.max_context_length = max_context_length
        self.num_first_uses = 0  # passes recorded so far, see CapturedModel
        self._slices_itself = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """As PassModel. Rows that decode alone are a batch; with prompts, all tokens are one long sequence.

        What a token costs falls with the number of tokens in a pass, until the processor has its hands full.
        """
        parts = equal_parts(parts)
        if len(parts) == 1 and parts[0].num_queries <= TOKENS_MULTIPLE:
            return [self.forward_batch(parts[0])]
        return self.forward_packed(parts)

    def use_threads(self, num_threads: int) -> None:
        """As PassModel; torch has one number for all models."""
        torch.set_num_threads(num_threads)

    def forward_batch(self, part: PassPart) -> torch.Tensor:
        """Logits [rows, num_logits, vocab] of rows that are all fed equally many tokens."""
        attention = self._attention(part)
        return self.run(part.ids, attention.positions, attention, part.num_logits)

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: RowAttention | PackedAttention, kept: Any
    ) -> torch.Tensor:
        """Logits [rows, kept, vocab]. ids, positions: [rows, queries]. kept: how many of the last positions, or which."""
        options = {"logits_to_keep": kept} if self._slices_itself else {}
        output = self.model(
            input_ids=ids,
            position_ids=positions.clamp(max=self.max_context_length - 1),
            use_cache=False,
            row_attention=attention,
            **options,
        )
        if self._slices_itself:
            return output.logits
        return output.logits[:, kept if isinstance(kept, torch.Tensor) else slice(-kept, None)]

    def forward_packed(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits of each part, whose tokens follow each other in one sequence."""
        attentions = [self._attention(part) for part in parts]
        num_padding = -sum(part.ids.numel() for part in parts) % TOKENS_MULTIPLE
        ids = torch.cat([part.ids.flatten() for part in parts])
        positions = torch.cat([attention.positions.flatten() for attention in attentions])
        logits = self.run(
            F.pad(ids, (0, num_padding))[None],
            F.pad(positions, (0, num_padding))[None],
            PackedAttention(attentions, num_padding),
            _kept_tokens(parts).to(self.device),
        )[0]
        pieces = logits.split([len(part.ids) * part.num_logits for part in parts])
        return [piece.unflatten(0, (len(part.ids), -1)) for piece, part in zip(pieces, parts, strict=True)]

    def _attention(self, part: PassPart) -> RowAttention:
        """What the layers need of a part. The rows' masks are made once per step; their pages are noted as written."""
        rows, end = part.rows, part.column + part.num_queries
        masks = rows.shared.get(self.pool.dtype)
        if masks is None:
            masks = rows.shared[self.pool.dtype] = StepMasks(rows.positions, rows.num_tokens, self.pool.dtype)
        self.pool.note_rows_written(rows.first_row, rows.starts + end)
        start = None if rows.common_start is None else rows.common_start + part.column
        return RowAttention(self.pool, masks, slice(part.column, end), rows.first_row, start)


def _kept_tokens(parts: Sequence[PassPart]) -> torch.Tensor:
    """Places of the tokens whose logits are wanted, in the sequence that the parts make."""
    kept, offset = [], 0
    for part in parts:
        places = torch.arange(offset, offset + part.ids.numel()).view(part.ids.shape)
        kept.append(places[:, -part.num_logits :].reshape(-1))
        offset += part.ids.numel()
    return torch.cat(kept)
