"""Triton kernels for everything between the matrix products of a Llama-style layer, on GPUs.

torch launches about fifteen kernels there in every layer, on some kilobytes each. On an H100 they take half as long as
reading the weights of a layer of a model with 7 billion parameters, and several times as long in a draft model's layer. The
five kernels here compute what the plain operators in `llama` do; the matrix products stay torch's. They are meant for
captured passes: launched from Python, one Triton kernel takes longer than all the torch kernels that it replaces.

Attention reads each row up to its own length. torch's attention reads all rows up to the longest, which is fixed in a
capture, so it would need a capture for every length. With few rows that may be long, several programs read one row's keys,
a part each, and a second kernel joins their results (Flash-Decoding, Dao et al. 2023).

Triton comes with torch's builds for GPUs. Importing this module fails where it is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl

# Limits of one attention program: number of queries, bytes of these, and bytes of the keys that it reads at once.
# With these, float32 at head size 256 fits in the 99 KiB of shared memory of compute capabilities 8.6 and 12.0.
QUERIES_PER_PROGRAM = 64
QUERIES_BYTES = 32_768
KEYS_BYTES = 16_384
SMALLEST_PRODUCT = 16  # smallest number of rows and columns of a product in Triton
SHORT_PLACES = 2048  # rows of up to this length are read by one program
MOST_PROGRAMS = 128  # that suffice to keep a large GPU busy
MOST_PARTS = 16  # into which one row's keys are split
NOTHING = tl.constexpr(-1e30)  # logarithm of an empty sum of weights; -inf - -inf would be NaN


_only_compiles = ContextVar("only_compiles", default=False)
HEADS_PER_PROGRAM = 16
COLUMNS_PER_PROGRAM = 1024


@contextmanager
def compiled_only() -> Iterator[None]:
    """Compile the kernels that the block launches, in parallel, without running them.

    Raises the compiler's errors. Outside of such a block, a kernel is compiled when it is first launched.
    """
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument. Triton itself uses the thread's current device."""
    with torch.cuda.device(arguments[0].device) if arguments[0].is_cuda else nullcontext():
        if _only_compiles.get():
            kernel.warmup(*arguments, grid=grid, **options)
        else:
            kernel[grid](*arguments, **options)


def attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    layer: torch.Tensor,
    scaling: float,
    window: int | None,
    num_places: int,
) -> torch.Tensor:
    """Causal attention of each query to its row: [rows, queries, heads, head_dim].

    query: [rows, heads, queries, head_dim]. rows: [rows], of the pool. positions: [rows, queries], contiguous. layer: keys
    and values of the pool. window: visible tokens, the query's own included. num_places: queries at
    positions from there on are padding, and get zeros.
    """
    num_rows, heads, queries, head_dim = query.shape
    kv_heads, length = layer.shape[2:4]
    grouped = heads // kv_heads * queries  # queries that read the same keys
    block_queries, block_keys, block_dim = block_sizes(grouped, head_dim, query.element_size())
    num_blocks = triton.cdiv(grouped, block_queries)
    num_parts = num_parts_of(num_rows * kv_heads * num_blocks, num_places)
    output = query.new_empty(num_rows, queries, heads, head_dim)
    found, sums = output, output
    if num_parts > 1:
        found = output.new_empty(num_parts, *output.shape, dtype=torch.float32)
        sums = found.new_empty(found.shape[:-1])
    launch(
        *(_attend, (num_rows, kv_heads, num_blocks * num_parts)),
        *(query, rows, positions, layer, found, sums, scaling, window or 0, num_places, grouped, queries, length),
        num_parts,
        has_parts=num_parts > 1,
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
    if num_parts > 1:
        count = num_rows * queries * heads
        sizes = {"num_parts": num_parts, "head_dim": head_dim, "block_dim": block_dim}
        launch(_join, (count,), found, sums, output, count, **sizes)
    return output


def block_sizes(num_queries: int, head_dim: int, element_size: int) -> tuple[int, int, int]:
    """Numbers of queries, keys and dimensions of one program. num_queries: queries that read the same keys."""
    block_dim = max(SMALLEST_PRODUCT, triton.next_power_of_2(head_dim))
    most_queries = min(QUERIES_PER_PROGRAM, max(SMALLEST_PRODUCT, QUERIES_BYTES // (block_dim * element_size)))
    block_queries = min(most_queries, max(SMALLEST_PRODUCT, triton.next_power_of_2(num_queries)))
    return block_queries, min(128, max(SMALLEST_PRODUCT, KEYS_BYTES // (block_dim * element_size))), block_dim


def num_parts_of(num_programs: int, num_places: int) -> int:
    """Number of parts, a power of two, into which a row's keys are split. num_programs: without a split."""
    most = min(MOST_PARTS, MOST_PROGRAMS // num_programs)
    return 1 if num_places <= SHORT_PLACES or most < 2 else 1 << (most.bit_length() - 1)


@triton.jit(do_not_specialize=["window", "num_places", "grouped", "queries", "num_parts"])
def _attend(
    query,
    rows,
    positions,
    layer,
    output,
    sums,
    scaling,
    window,
    num_places,
    grouped,
    queries,
    length,
    num_parts,
    has_parts: tl.constexpr,
    has_window: tl.constexpr,
    is_interpreted: tl.constexpr,
    num_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    """One program per row, key head, block of queries that read these keys, and part of the keys.

    output: [parts, rows, queries, heads, head_dim]. sums: [parts, rows, queries, heads], logarithms of the sums of the
    parts' weights; unused if there is one part.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    part = tl.program_id(2) % num_parts
    asked = tl.program_id(2) // num_parts * block_queries + tl.arange(0, block_queries)
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    position = tl.load(positions + row * queries + asked % queries, mask=asked < grouped, other=-1)
    position = tl.where(position < num_places, position, -1).to(tl.int32)
    first_asked = (row.to(tl.int64) * num_heads * queries + kv_head * grouped) * head_dim
    held = (asked < grouped)[:, None] & is_dim[None, :]
    q = tl.load(query + first_asked + asked[:, None] * head_dim + dims[None, :], mask=held, other=0.0)
    stored = tl.load(rows + row).to(tl.int64) * 2 * kv_heads + kv_head
    keys, values = layer + stored * length * head_dim, layer + (stored + kv_heads) * length * head_dim
    summed, total, best = _sum_values(
        q, position, keys, values, scaling, window, part, num_parts, has_window, is_interpreted, head_dim, block_keys
    )
    weight = tl.where(total > 0, total, 1.0)
    attended = summed / weight[:, None]
    head, column = kv_head * (grouped // queries) + asked // queries, asked % queries
    first_row = part.to(tl.int64) * tl.num_programs(0) + row
    place = (first_row * queries + column) * num_heads + head
    found = output + place[:, None] * head_dim + dims[None, :]
    tl.store(found, attended.to(output.dtype.element_ty), mask=held)
    if has_parts:
        tl.store(sums + place, tl.where(total > 0, best + tl.log(weight), NOTHING), mask=asked < grouped)


@triton.jit(do_not_specialize=["count"])
def _join(found, sums, output, count, num_parts: tl.constexpr, head_dim: tl.constexpr, block_dim: tl.constexpr):
    """One program per query and head, `count` in all: the mean of its parts' results, by their shares of the weights."""
    at = tl.program_id(0).to(tl.int64)
    places = at + tl.arange(0, num_parts).to(tl.int64) * count
    dims = tl.arange(0, block_dim)
    logs = tl.load(sums + places)
    weights = tl.exp(logs - tl.max(logs, axis=0))
    parts = tl.load(found + places[:, None] * head_dim + dims[None, :], mask=(dims < head_dim)[None, :], other=0.0)
    joined = tl.sum(parts * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(output + at * head_dim + dims, joined.to(output.dtype.element_ty), mask=dims < head_dim)


@triton.jit
def _sum_values(
    q,
    position,
    keys,
    values,
    scaling,
    window,
    part,
    num_parts,
    has_window: tl.constexpr,
    is_interpreted: tl.constexpr,
    head_dim: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Online softmax over the keys of a part that each query sees: weighted sum of values, sum of weights, largest score.

    Both sums are relative to the largest score.
    """
    dims = tl.arange(0, q.shape[1])
    is_dim = dims < head_dim
    end = tl.max(position, axis=0) + 1
    start = 0
    if has_window:
        # Padding queries do not count; if all are padding, nothing is read.
        first = tl.min(tl.where(position >= 0, position, end), axis=0)
        start = tl.maximum(0, first - window + 1) // block_keys * block_keys
    width = tl.cdiv(tl.cdiv(end - start, num_parts), block_keys) * block_keys
    start += part * width
    end = tl.minimum(end, start + width)
    best = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    summed = tl.zeros(q.shape, tl.float32)
    for first_key in range(start, end, block_keys):
        place = first_key + tl.arange(0, block_keys)
        is_read = (place < end)[:, None] & is_dim[None, :]
        key = tl.load(keys + place[:, None] * head_dim + dims[None, :], mask=is_read, other=0.0)
        value = tl.load(values + place[:, None] * head_dim + dims[None, :], mask=is_read, other=0.0)
        if is_interpreted:  # the interpreter reads bfloat16 as integers
            q, key, value = q.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        scores = _score(q, key, position, place, scaling, window, has_window)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A query that has seen no key yet has no largest score to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(best - base)
        summed = summed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * kept + tl.sum(weights, axis=1)
        best = higher
    return summed, total, best


@triton.jit
def _score(q, key, position, place, scaling, window, has_window: tl.constexpr):
    """Products of queries at `position` and keys at `place`; -inf for keys that a query does not see."""
    scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
    ages = position[:, None] - place[None, :]
    if has_window:
        scores = tl.where(ages < window, scores, float("-inf"))
    return tl.where(ages >= 0, scores, float("-inf"))


def add_norm(
    x: torch.Tensor, change: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + change, rounded, and its RMS norm. x, change: [..., hidden]; change may be None."""
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
    """silu(gate) * up, of gate and up concatenated in gate_up [..., 2 ffn]."""
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
    """Apply the rotary embedding. Returns queries [rows, heads, queries, head_dim]; keys and values are stored in the pool.

    projected: [rows, queries, heads + 2 kv_heads, head_dim]. cos, sin: [..., 1, head_dim], with the same stride for all
    queries. rows: [rows], of the pool. positions: [rows, queries], contiguous. layer: keys and values of the pool.
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
    """One program per token."""
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
    """One program per token and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < size
    value = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(value.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(output + row * size + columns, product.to(value.dtype), mask=inside)


# Otherwise Triton compiles special kernels for 1 and for multiples of 16 queries.
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
    """One program per token and block of heads, which are those of queries, then of keys, then of values."""
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
