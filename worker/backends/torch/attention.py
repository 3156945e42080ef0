"""Attention over rows of different lengths, for any model that goes through transformers' AttentionInterface.

`install` sets a model's attention to `attend_rows`. The engine calls the model with `use_cache=False`, positions per row and
a `RowAttention` as the extra keyword `row_attention`, which transformers passes to every attention layer. Each layer writes
this pass's keys and values into the pool at every row's own positions and attends within every row's length. The model's
code is unchanged, and transformers builds no mask.

A pass may also have several groups of rows, decoding ones and prompts (`PackedAttention`): the model gets their tokens as
one long sequence, which matters to nothing but attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from speclen.worker.backends.torch.row_attention import PackedAttention, RowAttention
from speclen.worker.models.forgetful import hand_on_arguments

IMPLEMENTATION = "speclen_rows"


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
    """As attend_rows, for a layer by its place. window: tokens seen, itself included. softcap, sinks: see `_attend_slowly`.

    Heads that share keys are folded into the query dimension, so that a key is read once for all of them.
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

    softcap: scores are squeezed into (-softcap, softcap). sinks: one more score per query, which takes a share of the weight
    and has no value.
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
    hand_on_arguments(model)
