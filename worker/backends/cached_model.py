"""A transformers model together with the pool that holds its rows' keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from speclen.worker.backends.attention import PackedAttention, RowAttention, StepMasks
from speclen.worker.backends.kv_cache import KVPool

# Packed passes are filled up to a multiple of so many tokens. Prompts have all lengths, and on a CPU a matrix product
# of a new size takes a millisecond longer the first time and keeps its kernel: the memory grew by 150 MB.
TOKENS_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class PassPart:
    """A group of rows in a pass. ids: [rows, queries], at attention.positions. num_logits: positions wanted per row."""

    ids: torch.Tensor
    attention: RowAttention
    num_logits: int


class CachedModel:
    """Runs a model over rows of its pool: decoding passes through `forward`, and prompts along with them.

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

    def forward_with_prompts(self, decoding: PassPart, prompts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits of the decoding rows, as forward gives them, and of each prompt, in one pass."""
        if not prompts:
            return [self.forward(decoding.ids, decoding.attention, decoding.num_logits)]
        return self.plain_forward_parts([decoding, *prompts])

    def plain_forward_parts(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits [rows, num_logits, vocab] of each part, as plain_forward gives them, in one pass.

        What a token costs falls with the number of tokens in a pass, until the processor has its hands full.
        """
        num_padding = -sum(part.ids.numel() for part in parts) % TOKENS_MULTIPLE
        ids = torch.cat([part.ids.flatten() for part in parts])
        positions = torch.cat([part.attention.positions.flatten() for part in parts])
        kept = _kept_tokens(parts).to(self.pool.device)
        options = {"logits_to_keep": kept} if self._slices_itself else {}
        output = self.model(
            input_ids=F.pad(ids, (0, num_padding))[None],
            position_ids=F.pad(positions.clamp(max=self.max_context_length - 1), (0, num_padding))[None],
            use_cache=False,
            row_attention=PackedAttention([part.attention for part in parts], num_padding),
            **options,
        )
        logits = output.logits[0] if self._slices_itself else output.logits[0, kept]
        pieces = logits.split([len(part.ids) * part.num_logits for part in parts])
        return [piece.unflatten(0, (len(part.ids), -1)) for piece, part in zip(pieces, parts, strict=True)]

    def prompt_part(self, row: int, ids: Sequence[int], start: int) -> PassPart:
        """One row's tokens start, start + 1, ...; the logits wanted follow the last one."""
        device, end = self.pool.device, start + len(ids)
        positions = torch.arange(start, end, device=device)[None]
        masks = StepMasks(positions, end, self.pool.dtype)
        attention = RowAttention(self.pool, masks, slice(None), first_row=row, start=start)
        return PassPart(torch.tensor([ids], device=device), attention, num_logits=1)

    def prefill(self, row: int, ids: Sequence[int], start: int) -> torch.Tensor:
        """Feed one row's tokens start, start + 1, ...; returns the logits [1, 1, vocab] that follow the last one."""
        part = self.prompt_part(row, ids, start)
        logits = self.plain_forward(part.ids, part.attention, part.num_logits)
        self.pool.note_written(row, start + len(ids))
        return logits


def _kept_tokens(parts: Sequence[PassPart]) -> torch.Tensor:
    """Places of the tokens whose logits are wanted, in the sequence that the parts make."""
    kept, offset = [], 0
    for part in parts:
        places = torch.arange(offset, offset + part.ids.numel()).view(part.ids.shape)
        kept.append(places[:, -part.num_logits :].reshape(-1))
        offset += part.ids.numel()
    return torch.cat(kept)
