"""Widening of a Llama-style model without changing its function: a small model at the cost of a large one.

Every hidden unit, head and FFN unit is replicated, and the outputs of r copies are weighted by coefficients that sum to one,
as in Net2Net (Chen, Goodfellow and Shlens 2016, arXiv 1511.05641). The coefficients are powers of two even for r = 3 (1/2,
1/4, 1/4), so every weight stays exact in bfloat16 and only the order of summation differs:

    copies of hidden units   coefficients in the norm that reads them (input, post-attention and final norm)
    copies of heads          coefficients in the columns of o_proj
    copies of FFN units      coefficients in the columns of down_proj

RMSNorm is unchanged, because all units are replicated equally often. Additional layers have output projections of zero:
they cost as much as other layers and add nothing to the residual stream.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaForCausalLM

from speclen.worker.models.naming import Shape


def coefficients(num_copies: int) -> list[float]:
    """num_copies powers of two that sum to exactly one, for example 1/2, 1/4, 1/4."""
    power = num_copies.bit_length() - 1
    num_split = num_copies - 2**power  # This many of the 2**power equal parts are halved.
    return [2.0**-power] * (2**power - num_split) + [2.0 ** -(power + 1)] * (2 * num_split)


def widened_config(config: Any, shape: Shape) -> Any:
    """Configuration of the widened model. shape: its sizes, multiples of the small model's."""
    wide = copy.deepcopy(config)
    wide.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wide.num_key_value_heads = config.num_key_value_heads * (shape.heads // config.num_attention_heads)
    wide.hidden_size, wide.num_attention_heads, wide.intermediate_size = shape.hidden, shape.heads, shape.ffn
    wide.num_hidden_layers = shape.layers
    return wide


@torch.no_grad()
def widen(model: Any, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A wider model with the same logits as `model`, built directly on `device` and in `dtype`.

    Apart from the result, nothing larger than the small model is allocated. shape: sizes, multiples of the small model's.
    """
    small = model.config
    hidden, heads = shape.hidden // small.hidden_size, shape.heads // small.num_attention_heads
    ffn = shape.ffn // small.intermediate_size
    with torch.device("meta"):
        blank: Any = LlamaForCausalLM(widened_config(small, shape))
    wide = blank.to(dtype).to_empty(device=device)
    # Buffers are empty after to_empty: copied from the small model, which has the same head dimension.
    wide.model.rotary_emb = copy.deepcopy(model.model.rotary_emb).to(device)
    _replicate(wide.model.embed_tokens.weight, model.model.embed_tokens.weight, 1, hidden)
    if wide.config.tie_word_embeddings:
        wide.tie_weights()
    else:
        _replicate(wide.lm_head.weight, model.lm_head.weight, 1, hidden)
    _replicate_norm(wide.model.norm.weight, model.model.norm.weight, hidden)
    small_layers = model.model.layers
    for index, layer in enumerate(wide.model.layers):
        _widen_layer(layer, small_layers[index % len(small_layers)], hidden, heads, ffn)
        if index >= len(small_layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def _widen_layer(wide: Any, small: Any, hidden: int, heads: int, ffn: int) -> None:
    """hidden, heads, ffn: number of copies."""
    _replicate_norm(wide.input_layernorm.weight, small.input_layernorm.weight, hidden)
    _replicate_norm(wide.post_attention_layernorm.weight, small.post_attention_layernorm.weight, hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        _replicate(getattr(wide.self_attn, name).weight, getattr(small.self_attn, name).weight, heads, hidden)
    _replicate(wide.self_attn.o_proj.weight, small.self_attn.o_proj.weight, hidden, heads, weighted=True)
    for name in ("gate_proj", "up_proj"):
        _replicate(getattr(wide.mlp, name).weight, getattr(small.mlp, name).weight, ffn, hidden)
    _replicate(wide.mlp.down_proj.weight, small.mlp.down_proj.weight, hidden, ffn, weighted=True)


def _replicate(
    wide: torch.Tensor, small: torch.Tensor, row_copies: int, column_copies: int, weighted: bool = False
) -> None:
    """Fill wide [row_copies * rows, column_copies * columns] with copies of small [rows, columns], in place.

    Copy c of a unit is unit c * units + u. weighted: the copies of each column get coefficients that sum to one.
    """
    rows, columns = small.shape
    narrow = small.to(wide.device, wide.dtype)[:, None, :].expand(rows, column_copies, columns)
    if weighted:
        scale = torch.tensor(coefficients(column_copies), device=wide.device, dtype=wide.dtype)
        narrow = narrow * scale[:, None]
    wide.view(row_copies, rows, column_copies, columns).copy_(narrow.expand(row_copies, rows, column_copies, columns))


def _replicate_norm(wide: torch.Tensor, small: torch.Tensor, copies: int) -> None:
    """Fill wide [copies * hidden] with copies of small [hidden], weighted by coefficients that sum to one."""
    scale = torch.tensor(coefficients(copies), device=wide.device, dtype=wide.dtype)
    torch.mul(small.to(wide.device, wide.dtype)[None, :], scale[:, None], out=wide.view(copies, -1))
