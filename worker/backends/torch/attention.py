"""Attention over rows of different lengths, for any model that goes through transformers' AttentionInterface.

`install` points a model at `attend_rows`. The engine then calls the model with `use_cache=False`, positions per row and
a `RowAttention` as the extra keyword `row_attention`, which transformers hands down to every attention layer. Each layer
writes this pass's keys and values into the pool at every row's own positions and attends within every row's length. The
model's code is not touched, and transformers builds no mask of its own.

What all layers share is made once per pass: write positions, and one mask per sliding window.

A pass may also take several groups of rows at once, decoding ones and prompts (`PackedAttention`): the model sees their
tokens as one long sequence, which is all the same to everything in it but attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from speclen.worker.backends.kv_cache import KVPool
from speclen.worker.models.forgetful import hand_on_arguments
from speclen.worker.models.upload import upload

IMPLEMENTATION = "speclen_rows"
# torch's kernel for GPUs reads eight numbers of a mask at once. Whether it may, it tells from strides, not from where a
# column begins: of an odd number of tokens some columns end the process ("misaligned address"), others are copied.
GPU_MASK_MULTIPLE = 16


class StepMasks:
    """Additive masks of one step: which tokens the queries at given positions may see.

    positions: [rows, columns], where a column is one token position of each row. Passes of the step that use some of
    these columns share the masks.
    """

    def __init__(self, positions: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> None:
        """num_tokens: tokens that any pass reads, more than every position."""
        self.positions = positions
        self.num_tokens = num_tokens
        self.dtype = dtype
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """[rows, 1, columns, num_tokens or more]: 0 where a query may look, -inf where not, as beyond num_tokens.

        window: tokens seen, itself included.
        """
        mask = self._masks.get(window)
        if mask is None:
            device = self.positions.device
            multiple = 1 if device.type == "cpu" else GPU_MASK_MULTIPLE
            padded = -(-self.num_tokens // multiple) * multiple
            ages = self.positions[:, None, :, None] - torch.arange(padded, device=device)
            hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask
        return mask


class RowAttention:
    """One pass of one model over rows first_row, first_row + 1, ... of its pool.

    columns: which columns of the masks this pass feeds. start: set when every row writes from that position on, so that
    writing is a plain copy. num_fed: tokens of all rows.
    """

    def __init__(
        self,
        pool: KVPool,
        masks: StepMasks,
        columns: slice,
        first_row: int = 0,
        start: int | None = None,
    ) -> None:
        self.pool = pool
        self.masks = masks
        self.columns = columns
        self.first_row = first_row
        self.start = start
        self.positions = masks.positions[:, columns]
        self.num_rows, self.num_queries = self.positions.shape
        self.num_fed = self.num_rows * self.num_queries
        self._write_index: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._grouped: dict[tuple[int | None, int], torch.Tensor] = {}

    def write(self, layer: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [rows, kv_heads, queries, head_dim] at every row's positions."""
        if self.start is not None:
            rows = layer[self.first_row : self.first_row + self.num_rows]
            rows[:, 0, :, self.start : self.start + self.num_queries] = key
            rows[:, 1, :, self.start : self.start + self.num_queries] = value
            return
        head_dim = key.shape[-1]
        key_index, value_index = self._indices(key.shape[1])
        flat = layer.view(-1, head_dim)
        flat.index_copy_(0, key_index, key.reshape(-1, head_dim))
        flat.index_copy_(0, value_index, value.reshape(-1, head_dim))

    def _indices(self, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of keys and of values to write, in a layer seen as [rows * 2 * kv_heads * max_length, head_dim]."""
        cached = self._write_index.get(kv_heads)
        if cached is None:
            device, length = self.positions.device, self.pool.max_length
            heads = self._rows()[:, None] * (2 * kv_heads) + torch.arange(kv_heads, device=device)
            keys = (heads[:, :, None] * length + self.positions[:, None, :]).reshape(-1)
            cached = self._write_index[kv_heads] = (keys, keys + kv_heads * length)
        return cached

    def _rows(self) -> torch.Tensor:
        """[rows] of the pool."""
        return torch.arange(self.first_row, self.first_row + self.num_rows, device=self.positions.device)

    def fed_positions(self) -> torch.Tensor:
        """[num_fed], row after row."""
        return self.positions.flatten()

    def rectangle(self, fed: torch.Tensor) -> torch.Tensor:
        """Of [heads, num_fed, head_dim], row after row: [rows, heads, queries, head_dim]."""
        return fed.unflatten(1, (self.num_rows, self.num_queries)).transpose(0, 1)

    def flat(self, output: torch.Tensor) -> torch.Tensor:
        """Of [rows, queries, heads, head_dim]: [num_fed, heads, head_dim], row after row."""
        return output.flatten(0, 1)

    def read(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [rows, kv_heads, num_tokens, head_dim] of keys and values."""
        rows = layer[self.first_row : self.first_row + self.num_rows, :, :, : self.masks.num_tokens]
        return rows[:, 0], rows[:, 1]

    def mask(self, window: int | None, repeats: int) -> torch.Tensor:
        """[rows, 1, repeats * queries, num_tokens]: the queries' masks, repeated."""
        grouped = self._grouped.get((window, repeats))
        if grouped is None:
            grouped = self.masks.mask(window)[:, :, self.columns]
            if repeats > 1:
                rows, _, queries, tokens = grouped.shape
                grouped = grouped.expand(rows, repeats, queries, tokens).reshape(rows, 1, repeats * queries, tokens)
            grouped = self._grouped[window, repeats] = grouped[..., : self.masks.num_tokens]
        return grouped


class RecordedRows(RowAttention):
    """Rows in a pass that is recorded, so that starting its kernels costs nothing later.

    rows: [rows], of the pool: 0, 1, ... unless kernels attend, which know how to find others. num_places: of a row, beyond
    which are those of queries that only fill up.
    """

    def __init__(self, pool: KVPool, masks: StepMasks, rows: torch.Tensor, num_places: int) -> None:
        super().__init__(pool, masks, slice(None))
        self.rows = rows
        self.num_places = num_places

    def _rows(self) -> torch.Tensor:
        return self.rows


class JoinedRows(RowAttention):
    """Rows of any place that are fed different numbers of tokens, as if all were fed as many: their last one repeatedly.

    On a GPU kernels for each of them take as long as those for all. What is repeated is written to the same place, and its
    output left out. rows, starts, counts: [n], of the pool, of tokens that each holds, and of those it is fed.
    """

    def __init__(self, pool: KVPool, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        device, width = pool.device, np.arange(counts.max())
        columns = np.minimum(width, counts[:, None] - 1)
        positions = upload(starts[:, None] + columns, device)
        super().__init__(pool, StepMasks(positions, int((starts + counts).max()), pool.dtype), slice(None))
        self.num_fed = int(counts.sum())
        self._places = upload(rows, device)
        firsts = np.cumsum(counts) - counts
        self._token_at = upload((firsts[:, None] + columns).ravel(), device)
        self._kept = upload(np.flatnonzero(width < counts[:, None]), device)

    def _rows(self) -> torch.Tensor:
        return self._places

    def fed_positions(self) -> torch.Tensor:
        return self.positions.flatten()[self._kept]

    def rectangle(self, fed: torch.Tensor) -> torch.Tensor:
        return super().rectangle(fed.index_select(1, self._token_at))

    def flat(self, output: torch.Tensor) -> torch.Tensor:
        return super().flat(output).index_select(0, self._kept)

    def read(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = layer[:, :, :, : self.masks.num_tokens].index_select(0, self._places)
        return rows[:, 0], rows[:, 1]


class PackedAttention:
    """One pass of one model over several groups of rows, whose tokens follow each other in one sequence.

    parts: a group each; their tokens lie row after row. num_padding: tokens at the end that are there only to fill up;
    they see nothing and nobody sees them.
    """

    def __init__(self, parts: Sequence[RowAttention], num_padding: int = 0) -> None:
        self.parts = parts
        self.num_padding = num_padding

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[1, heads, tokens, head_dim] as the parts' [rows, heads, queries, head_dim]."""
        *pieces, _ = tensor[0].split([*(part.num_fed for part in self.parts), self.num_padding], dim=1)
        return [part.rectangle(piece) for piece, part in zip(pieces, self.parts, strict=True)]

    def join(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The parts' [rows, queries, heads, head_dim] as [1, tokens, heads, head_dim]."""
        flat = [part.flat(output) for output, part in zip(outputs, self.parts, strict=True)]
        flat.append(flat[0].new_zeros(self.num_padding, *flat[0].shape[1:]))
        return torch.cat(flat)[None]


def attend_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_attention: RowAttention | PackedAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [rows, queries, heads, head_dim]. query: [rows, heads, queries, head_dim]; key, value: kv_heads.

    Of a packed pass rows is 1 and queries all of its tokens.
    """
    index: int = module.layer_idx  # type: ignore[assignment]
    return attend(index, row_attention, query, key, value, scaling, sliding_window, softcap, s_aux), None


def attend(
    layer_index: int,
    row_attention: RowAttention | PackedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As attend_rows, for a layer by its place. window: tokens seen, itself included. sinks: [heads], see `_sunk`."""
    if isinstance(row_attention, RowAttention):
        return _attend(layer_index, row_attention, query, key, value, scaling, window, softcap, sinks)
    queries, keys, values = (row_attention.split(tensor) for tensor in (query, key, value))
    outputs = [
        _attend(layer_index, part, q, k, v, scaling, window, softcap, sinks)
        for part, q, k, v in zip(row_attention.parts, queries, keys, values, strict=True)
    ]
    return row_attention.join(outputs)


def _attend(
    layer_index: int,
    row_attention: RowAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one group of rows, as `attend`.

    Heads that share keys are folded into the query dimension, so that a key is read once for all of them.
    """
    row_attention.write(row_attention.pool.layers[layer_index], key, value)
    rows, heads, queries, head_dim = query.shape
    keys, values = row_attention.read(row_attention.pool.layers[layer_index])
    kv_heads = keys.shape[1]
    repeats = heads // kv_heads
    folded = query.reshape(rows, kv_heads, repeats * queries, head_dim)
    if sinks is not None:
        sinks = sinks.view(1, kv_heads, repeats, 1).expand(rows, -1, -1, queries).reshape(*folded.shape[:3], 1)
        output = _sunk(folded, keys, values, row_attention.mask(window, repeats), scaling, sinks)
    elif softcap is not None:
        output = _softcapped(folded, keys, values, row_attention.mask(window, repeats), scaling, softcap)
    elif folded.shape[2] == 1 and query.dtype != torch.float32 and query.device.type == "cpu":
        # torch's CPU kernel takes 2 to 3.5 times as long for one 16-bit query as for two.
        mask = row_attention.mask(window, 1).expand(-1, -1, 2, -1)
        doubled = folded.expand(-1, -1, 2, -1)
        output = F.scaled_dot_product_attention(doubled, keys, values, attn_mask=mask, scale=scaling)[:, :, :1]
    else:
        mask = row_attention.mask(window, repeats)
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    value_dim = output.shape[-1]
    # In one piece, as transformers' own functions give it: some families take a view of it.
    return output.reshape(rows, heads, queries, value_dim).transpose(1, 2).contiguous()


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores are squeezed into (-softcap, softcap), which no fused kernel of torch offers."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)


def _sunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention with one more score for every query, `sinks`, which takes its share of the weight and has no value."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale + mask
    weights = torch.softmax(torch.cat([scores, sinks.to(scores.dtype)], dim=-1), dim=-1, dtype=torch.float32)
    return torch.matmul(weights[..., :-1].to(query.dtype), values)


def install(model: Any) -> None:
    """Make the model's attention go through `attend_rows`. Whether that worked is for `check_model` to find out."""
    AttentionInterface.register(IMPLEMENTATION, attend_rows)
    model.set_attn_implementation(IMPLEMENTATION)
    hand_on_arguments(model)
