"""Triton kernels for the operators between the matrix products of a Llama-style layer, on GPUs.

torch launches about fifteen kernels there in every layer, on some kilobytes each: on an H100 they take half as long as
reading the weights of a layer of a model of 7 billion parameters, and several times as long in a draft's layer. Here are
five; the products stay torch's. They compute what the plain operators in `llama` do. They are for recorded passes: from
Python Triton launches one more slowly than torch all that it replaces.

Triton comes with torch's builds for GPUs. Importing this module fails where it is missing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speclen.worker.backends.torch.fused_attention import attend, compiled_only, launch

__all__ = ["add_norm", "attend", "compiled_only", "gate", "rotate_and_store"]

HEADS_PER_PROGRAM = 16
COLUMNS_PER_PROGRAM = 1024


def add_norm(
    x: torch.Tensor, change: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + change (x without one), rounded, and its RMS norm. x, change: [..., hidden]."""
    size = x.shape[-1]
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = x if change is None else torch.empty_like(x)
    launch(
        *(_add_norm, (x.numel() // size,)),
        *(x, x if change is None else change.contiguous(), weight, total, normed, size, eps),
        has_change=change is not None,
        block=triton.next_power_of_2(size),
        num_warps=8 if size >= 2048 else 4,
    )
    return total, normed


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for gate and up [..., ffn] side by side in [..., 2 ffn]."""
    size = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    output = gate_up.new_empty(*gate_up.shape[:-1], size)
    grid = (output.numel() // size, triton.cdiv(size, COLUMNS_PER_PROGRAM))
    launch(_gate, grid, gate_up, output, size, block=COLUMNS_PER_PROGRAM)
    return output


def rotate_and_store(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    layer: torch.Tensor,
) -> torch.Tensor:
    """Rotated queries [rows, heads, queries, head_dim]; rotated keys and values go into the pool.

    projected: [rows, queries, heads + 2 kv_heads, head_dim]. cos, sin: [..., 1, head_dim], of all queries equally far apart
    in memory. rows: [rows], of the pool, whose layer is written to. positions: [rows, queries], contiguous.
    """
    num_rows, queries, num_projected, head_dim = projected.shape
    num_stored, length = 2 * layer.shape[2], layer.shape[3]
    heads = num_projected - num_stored
    query = projected.new_empty(num_rows, heads, queries, head_dim)
    projected = projected.contiguous()
    launch(
        *(_rotate_and_store, (num_rows * queries, triton.cdiv(num_projected, HEADS_PER_PROGRAM))),
        *(projected, cos, sin, rows, positions, query, layer),
        *(queries, length, cos.stride(1)),
        num_heads=heads,
        num_stored=num_stored,
        head_dim=head_dim,
        block_heads=HEADS_PER_PROGRAM,
        block_dim=triton.next_power_of_2(head_dim),
    )
    return query


@triton.jit
def _add_norm(
    x,
    change,
    weight,
    total,
    normed,
    size,
    eps,
    has_change: tl.constexpr,
    block: tl.constexpr,
):
    """One program a token."""
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, block)
    inside = columns < size
    value = tl.load(x + start + columns, mask=inside, other=0.0)
    if has_change:
        added = tl.load(change + start + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + start + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scaled = wide / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + columns, (scaled * weights).to(value.dtype), mask=inside)


@triton.jit
def _gate(gate_up, output, size, block: tl.constexpr):
    """One program a token and block columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    value = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(value.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(output + row * size + columns, product.to(value.dtype), mask=inside)


# Else Triton compiles special kernels for 1, 16 and other numbers of queries.
@triton.jit(do_not_specialize=["queries"])
def _rotate_and_store(
    projected,
    cos,
    sin,
    rows,
    positions,
    query,
    layer,
    queries,
    length,
    angle_stride,
    num_heads: tl.constexpr,
    num_stored: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
):
    """One program a token and block_heads heads: of queries, then keys, then values, as they lie in `projected`."""
    token = tl.program_id(0)
    row, column = token // queries, token % queries
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    dims = tl.arange(0, block_dim)[None, :]
    inside = (head < num_heads + num_stored) & (dims < head_dim)
    source = projected + token.to(tl.int64) * (num_heads + num_stored) * head_dim + head * head_dim
    value = tl.load(source + dims, mask=inside, other=0.0)
    exchanged = tl.load(source + (dims + head_dim // 2) % head_dim, mask=inside, other=0.0)
    cosine = tl.load(cos + token * angle_stride + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * angle_stride + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    turned = (value.to(tl.float32) * cosine + exchanged.to(tl.float32) * sine).to(value.dtype)
    kept = tl.where(head < num_heads + num_stored // 2, turned, value)
    asked = query + ((row.to(tl.int64) * num_heads + head) * queries + column) * head_dim + dims
    tl.store(asked, kept, mask=inside & (head < num_heads))
    position = tl.load(positions + token)
    place = (tl.load(rows + row).to(tl.int64) * num_stored + head - num_heads) * length + position
    tl.store(layer + place * head_dim + dims, kept, mask=inside & (head >= num_heads))
