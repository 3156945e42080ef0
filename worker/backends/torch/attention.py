"""Attention over rows of different lengths, for any model that goes through transformers' AttentionInterface.

`install` sets a model's attention to `attend_rows`. The engine calls the model with `use_cache=False`, positions per row and
a `RowAttention` as the extra keyword `row_attention`, which transformers passes to every attention layer. Each layer writes
this pass's keys and values into the pool at every row's own positions and attends within every row's length. The model's
code is unchanged, and transformers builds no mask.

A pass may also have several groups of rows, such as decoding ones and prompts (`PackedAttention`). The model then gets all
tokens as one long sequence, a difference that only attention has to know of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from speclen.worker.backends.kv_cache import KVPool

# torch's GPU kernel reads eight mask elements at once and checks strides, but not the address of a column: with an odd
# number of tokens some columns crash the process ("misaligned address"), and others are copied.
GPU_MASK_MULTIPLE = 16
IMPLEMENTATION = "speclen_rows"
# Layers that do not pass further keyword arguments on to their attention.
FORGETFUL_LAYERS = ("NemotronDecoderLayer", "StableLmDecoderLayer")


class StepMasks:
    """Additive masks of one step, shared by its passes. positions: [rows, columns], of the queries."""

    def __init__(self, positions: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> None:
        """num_tokens: of a row, that attention reads; larger than every position."""
        self.positions = positions
        self.num_tokens = num_tokens
        self.dtype = dtype
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """[rows, 1, columns, num_tokens or more]: 0 for visible tokens, else -inf.

        window: visible tokens, the query's own included.
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
    """Attention in one pass of a model, over rows first_row, first_row + 1, ... of its pool.

    columns: of the masks, those of this pass. start: set if all rows write from the same position on, which makes writing a
    plain copy.
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
        """Indices of the keys and values to write, in a layer viewed as [rows * 2 * kv_heads * max_length, head_dim]."""
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
    """Attention in a captured pass.

    rows: [rows], of the pool: 0, 1, ..., or any rows if our kernels are used. num_places: positions of a row from there on
    are padding.
    """

    def __init__(self, pool: KVPool, masks: StepMasks, rows: torch.Tensor, num_places: int) -> None:
        super().__init__(pool, masks, slice(None))
        self.rows = rows
        self.num_places = num_places

    def _rows(self) -> torch.Tensor:
        return self.rows


class PackedAttention:
    """Attention in one pass of a model over several groups of rows, whose tokens form one sequence.

    parts: the groups, their tokens row after row. num_padding: padding tokens at the end, which attention ignores.
    """

    def __init__(self, parts: Sequence[RowAttention], num_padding: int = 0) -> None:
        self.parts = parts
        self.num_padding = num_padding

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[1, heads, tokens, head_dim] as the parts' [rows, heads, queries, head_dim]."""
        counts = [part.num_rows * part.num_queries for part in self.parts]
        *pieces, _ = tensor[0].split([*counts, self.num_padding], dim=1)
        return [
            piece.unflatten(1, (part.num_rows, part.num_queries)).transpose(0, 1)
            for piece, part in zip(pieces, self.parts, strict=True)
        ]

    def join(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The parts' [rows, queries, heads, head_dim] as [1, tokens, heads, head_dim]."""
        flat = [output.flatten(0, 1) for output in outputs]
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

    In a packed pass there is one row, and its queries are all tokens of the pass.
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
    """As attend_rows, for the layer with this index. window: visible tokens, the query's own included.

    softcap, sinks: see `_attend_slowly`. Heads that share keys are folded into the query dimension, so that a key is read
    once for all of them.
    """
    if isinstance(row_attention, PackedAttention):
        options, split = (scaling, window, softcap, sinks), map(row_attention.split, (query, key, value))
        parts = zip(row_attention.parts, *split, strict=True)
        return row_attention.join([attend(layer_index, part, q, k, v, *options) for part, q, k, v in parts])
    row_attention.write(row_attention.pool.layers[layer_index], key, value)
    rows, heads, queries, head_dim = query.shape
    keys, values = row_attention.read(row_attention.pool.layers[layer_index])
    kv_heads = keys.shape[1]
    repeats = heads // kv_heads
    folded = query.reshape(rows, kv_heads, repeats * queries, head_dim)
    mask = row_attention.mask(window, repeats)
    if sinks is not None or softcap is not None:
        if sinks is not None:
            sinks = sinks.view(1, kv_heads, repeats, 1).expand(rows, -1, -1, queries).reshape(*folded.shape[:3], 1)
        output = _attend_slowly(folded, keys, values, mask, scaling, softcap, sinks)
    elif folded.shape[2] == 1 and query.dtype != torch.float32 and query.device.type == "cpu":
        # torch's CPU kernel takes 2 to 3.5 times as long for one 16-bit query as for two.
        doubled, mask = folded.expand(-1, -1, 2, -1), mask.expand(-1, -1, 2, -1)
        output = F.scaled_dot_product_attention(doubled, keys, values, attn_mask=mask, scale=scaling)[:, :, :1]
    else:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    # Contiguous, as transformers' own functions return it: some families take a view of it.
    return output.reshape(rows, heads, queries, output.shape[-1]).transpose(1, 2).contiguous()


def _attend_slowly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention for which torch has no fused kernel.

    softcap: scores are mapped into (-softcap, softcap). sinks: an additional score per query, which takes a share of the
    weight and has no value.
    """
    scores = torch.matmul(query, keys.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : keys.shape[2]]
    return torch.matmul(weights.to(query.dtype), values)


def install(model: Any) -> None:
    """Route the model's attention through `attend_rows`; `check_model` verifies it."""
    AttentionInterface.register(IMPLEMENTATION, attend_rows)
    model.set_attn_implementation(IMPLEMENTATION)
    pass_arguments_on(model)


def pass_arguments_on(model: Any) -> None:
    """Hook layers of these families, so that they pass the engine's arguments on to their attention."""
    for layer in model.modules():
        is_hooked = bool(layer._forward_pre_hooks)  # noqa: SLF001 - torch has no public question
        if type(layer).__name__ in FORGETFUL_LAYERS and not is_hooked:
            layer.register_forward_pre_hook(_keep_arguments, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(_add_arguments, with_kwargs=True)


def _keep_arguments(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    layer.self_attn.passed_on = {name: kwargs[name] for name in ("row_attention", "paged") if name in kwargs}


def _add_arguments(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | attention.passed_on
