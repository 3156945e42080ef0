"""A transformers model with the KV cache of its rows: the forward passes of torch, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from speclen.worker.backends.kv_cache import KVPool
from speclen.worker.backends.passes import PassPart, RaggedPart, equal_parts
from speclen.worker.backends.torch.attention import PackedAttention, RowAttention, StepMasks
from speclen.worker.models.devices import upload

# Packed passes are padded to a multiple of this. On a CPU a matrix product of a new size takes a millisecond more and keeps
# its kernel: with prompts of all lengths memory grew by 150 MB.
TOKENS_MULTIPLE = 16


class CachedModel:
    """A `PassModel` that runs a model over the rows of its pool.

    max_context_length: positions beyond it are clamped, since models with learned positions have no others.
    """

    ragged = False
    slow_changes = False

    def __init__(self, model: Any, pool: KVPool, max_context_length: int) -> None:
        self.model = model
        self.pool = pool
        self.device = pool.device
        self.max_context_length = max_context_length
        self.num_first_uses = 0  # passes captured so far, see CapturedModel
        self.asynchronous = self.device.type == "cuda"

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """As PassModel. Decoding rows alone are a batch; together with prompts, all tokens form one long sequence.

        The more tokens a pass has, the less each of them costs, until the processor is saturated.
        """
        parts = equal_parts(parts)
        if len(parts) == 1 and parts[0].num_queries <= TOKENS_MULTIPLE:
            attention = self._attention(parts[0])
            with without_cudnn_attention(self.device):
                return [self.run(parts[0].ids, attention.positions, attention, parts[0].num_logits)]
        return self.forward_packed(parts)

    def use_threads(self, num_threads: int) -> None:
        """As PassModel. torch has one number of threads for all models."""
        torch.set_num_threads(num_threads)

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: RowAttention | PackedAttention, kept: Any
    ) -> torch.Tensor:
        """Logits [rows, kept, vocab]. ids, positions: [rows, queries]. kept: number of last positions, or indices."""
        if isinstance(kept, int) and kept < ids.shape[1]:
            # Given a number, Gemma 4 computes only these positions in the layers that share keys and values.
            kept = torch.arange(ids.shape[1] - kept, ids.shape[1], device=ids.device)
        output = self.model(
            input_ids=ids,
            position_ids=positions.clamp(max=self.max_context_length - 1),
            use_cache=False,
            row_attention=attention,
            logits_to_keep=kept,
        )
        return output.logits

    def forward_packed(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits of each part, with all tokens in one sequence."""
        attentions = [self._attention(part) for part in parts]
        num_padding = -sum(part.ids.numel() for part in parts) % TOKENS_MULTIPLE
        ids = torch.cat([part.ids.flatten() for part in parts])
        positions = torch.cat([attention.positions.flatten() for attention in attentions])
        with without_cudnn_attention(self.device):
            logits = self.run(
                F.pad(ids, (0, num_padding))[None],
                F.pad(positions, (0, num_padding))[None],
                PackedAttention(attentions, num_padding),
                upload(_kept_tokens(parts), self.device),
            )[0]
        pieces = logits.split([len(part.ids) * part.num_logits for part in parts])
        return [piece.unflatten(0, (len(part.ids), -1)) for piece, part in zip(pieces, parts, strict=True)]

    def _attention(self, part: PassPart) -> RowAttention:
        """Attention of a part. Masks are made once per step; the positions are noted as written."""
        rows, end = part.rows, part.column + part.num_queries
        masks = rows.shared.get(self.pool.dtype)
        if masks is None:
            masks = rows.shared[self.pool.dtype] = StepMasks(rows.positions, rows.num_tokens, self.pool.dtype)
        self.pool.note_written(rows.first_row, rows.starts + end)
        start = None if rows.common_start is None else rows.common_start + part.column
        return RowAttention(self.pool, masks, slice(part.column, end), rows.first_row, start)


@contextlib.contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Turn off cuDNN's attention on a GPU, which spends tens of milliseconds on every new shape.

    Prompts have many shapes. Captured passes have few, and use torch's choice.
    """
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _kept_tokens(parts: Sequence[PassPart]) -> np.ndarray:
    """Indices, in the packed sequence, of the tokens whose logits are wanted."""
    kept, offset = [], 0
    for part in parts:
        places = np.arange(offset, offset + part.ids.numel()).reshape(part.ids.shape)
        kept.append(places[:, -part.num_logits :].reshape(-1))
        offset += part.ids.numel()
    return np.concatenate(kept)
