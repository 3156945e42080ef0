"""Triton kernels for the operators between the matrix products of a Llama-style layer, on GPUs.

torch launches about fifteen kernels there in every layer, on some kilobytes each: on an H100 they take half as long as
reading the weights of a layer of a model of 7 billion parameters, and several times as long in a draft's layer. Here are
five; the products stay torch's. They compute what the plain operators in `llama` do. They are for recorded passes: from
Python Triton launches one more slowly than torch all that it replaces.

Attention reads each row up to its own length. torch's attention reads all rows up to the longest, which is fixed in a
recording: it needs one for every length.

Triton comes with torch's builds for GPUs. Importing this module fails where it is missing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

HEADS_PER_PROGRAM = 16
COLUMNS_PER_PROGRAM = 1024
# Of attention: most queries of one program, and most bytes of keys that it reads at once.
QUERIES_PER_PROGRAM = 64
KEYS_BYTES = 16_384
SMALLEST_PRODUCT = 16  # least rows and columns of a product in Triton


def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernels give the right results. Raises Triton's errors if they cannot be built or launched.

    Triton needs a C compiler.
    """
    ones = torch.ones(1, 4, device=device, dtype=dtype)
    total, normed = add_norm(ones, ones, ones[0], 0.0)
    gated = gate(torch.full((1, 8), 20.0, device=device, dtype=dtype))
    layer = torch.zeros(1, 2, 1, 4, 4, device=device, dtype=dtype)
    turns = torch.ones(1, 1, 1, 4, device=device, dtype=dtype)
    positions = torch.tensor([[1]], device=device)
    rows = torch.zeros(1, dtype=torch.long, device=device)
    query = rotate_and_store(ones.expand(3, 4)[None, None], turns, turns, rows, positions, layer)
    attended = attend(query, rows, positions, layer, 1e9, None, 4)  # sees only the second token, whose values are 1
    found = [total.sum(), normed.sum(), gated.sum(), query.sum(), layer.sum(), attended.sum()]
    return [round(float(value), 3) for value in found] == [8.0, 4.0, 1600.0, 8.0, 12.0, 4.0]


def add_norm(
    x: torch.Tensor, change: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + change (x without one), rounded, and its RMS norm. x, change: [..., hidden]."""
    size = x.shape[-1]
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = x if change is None else torch.empty_like(x)
    with device_of(x):
        _add_norm[(x.numel() // size,)](
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
    with device_of(gate_up):
        _gate[grid](gate_up, output, size, block=COLUMNS_PER_PROGRAM)
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
    with device_of(projected):
        _rotate_and_store[(num_rows * queries, triton.cdiv(num_projected, HEADS_PER_PROGRAM))](
            *(projected, cos, sin, rows, positions, query, layer),
            *(queries, length, cos.stride(1)),
            num_heads=heads,
            num_stored=num_stored,
            head_dim=head_dim,
            block_heads=HEADS_PER_PROGRAM,
            block_dim=triton.next_power_of_2(head_dim),
        )
    return query


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    layer: torch.Tensor,
    scaling: float,
    window: int | None,
    num_places: int,
) -> torch.Tensor:
    """Each query's attention to its row's tokens up to itself: [rows, queries, heads, head_dim].

    query: [rows, heads, queries, head_dim]. rows: [rows], of the pool, whose layer's keys and values are read. positions:
    [rows, queries], contiguous. window: visible tokens, the query's own included. num_places: of a row; padding queries, at
    positions from there on, get zeros.
    """
    num_rows, heads, queries, head_dim = query.shape
    kv_heads, length = layer.shape[2:4]
    grouped = heads // kv_heads * queries  # queries that read the same keys
    block_queries = min(QUERIES_PER_PROGRAM, max(SMALLEST_PRODUCT, triton.next_power_of_2(grouped)))
    block_dim = max(SMALLEST_PRODUCT, triton.next_power_of_2(head_dim))
    block_keys = min(128, max(SMALLEST_PRODUCT, KEYS_BYTES // (block_dim * query.element_size())))
    output = query.new_empty(num_rows, queries, heads, head_dim)
    with device_of(query):
        _attend[(num_rows, kv_heads, triton.cdiv(grouped, block_queries))](
            *(query, rows, positions, layer, output, scaling, window or 0, num_places, grouped, queries, length),
            has_window=window is not None,
            is_interpreted=not query.is_cuda,
            num_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_queries=block_queries,
            block_keys=block_keys,
            block_dim=block_dim,
            num_stages=2,
        )
    return output


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Context of a tensor's device: Triton launches on the thread's current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


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


@triton.jit(do_not_specialize=["window", "num_places", "grouped", "queries"])
def _attend(
    query,
    rows,
    positions,
    layer,
    output,
    scaling,
    window,
    num_places,
    grouped,
    queries,
    length,
    has_window: tl.constexpr,
    is_interpreted: tl.constexpr,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    """One program a row, head of keys, and block_queries of the queries that read them; softmax as it goes along."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    asked = tl.program_id(2) * block_queries + tl.arange(0, block_queries)
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    position = tl.load(positions + row * queries + asked % queries, mask=asked < grouped, other=-1)
    position = tl.where(position < num_places, position, -1).to(tl.int32)
    first_asked = (row.to(tl.int64) * num_heads * queries + kv_head * grouped) * head_dim
    held = (asked < grouped)[:, None] & is_dim[None, :]
    q = tl.load(query + first_asked + asked[:, None] * head_dim + dims[None, :], mask=held, other=0.0)
    stored = tl.load(rows + row).to(tl.int64) * 2 * kv_heads + kv_head
    keys, values = layer + stored * length * head_dim, layer + (stored + kv_heads) * length * head_dim
    end = tl.max(position, axis=0) + 1
    start = 0
    if has_window:
        # Only queries with a place count; without any, nothing is read.
        first = tl.min(tl.where(position >= 0, position, end), axis=0)
        start = tl.maximum(0, first - window + 1) // block_keys * block_keys
    best = tl.full([block_queries], float("-inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    summed = tl.zeros([block_queries, block_dim], tl.float32)
    for first_key in range(start, end, block_keys):
        place = first_key + tl.arange(0, block_keys)
        is_read = (place < end)[:, None] & is_dim[None, :]
        key = tl.load(keys + place[:, None] * head_dim + dims[None, :], mask=is_read, other=0.0)
        value = tl.load(values + place[:, None] * head_dim + dims[None, :], mask=is_read, other=0.0)
        if is_interpreted:  # the interpreter reads bfloat16 as integers
            q, key, value = q.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
        ages = position[:, None] - place[None, :]
        if has_window:
            scores = tl.where(ages < window, scores, float("-inf"))
        scores = tl.where(ages >= 0, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A query that has seen nothing yet has no best score to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(best - base)
        summed = summed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * kept + tl.sum(weights, axis=1)
        best = higher
    attended = summed / tl.where(total > 0, total, 1.0)[:, None]
    head, column = kv_head * (grouped // queries) + asked // queries, asked % queries
    place = ((row.to(tl.int64) * queries + column) * num_heads + head) * head_dim
    tl.store(output + place[:, None] + dims[None, :], attended.to(output.dtype.element_ty), mask=held)
