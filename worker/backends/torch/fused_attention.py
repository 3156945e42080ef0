"""Triton kernels for the attention of a Llama-style layer, see `fused`.

Attention reads each row up to its own length. torch's attention reads all rows up to the longest, which is fixed in a
recording: it needs one for every length. Of few rows that may be long, several programs read one row's keys, a part each,
and a second kernel joins what they found (Flash-Decoding, Dao et al. 2023).
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

# Of attention: most queries of one program, most bytes of them, and most bytes of keys that it reads at once. With these,
# float32 at head size 256 fits the 99 KiB that a program may share on GPUs of compute capability 8.6 and 12.0.
QUERIES_PER_PROGRAM = 64
QUERIES_BYTES = 32_768
KEYS_BYTES = 16_384
SMALLEST_PRODUCT = 16  # least rows and columns of a product in Triton
SHORT_PLACES = 2048  # of a row up to which one program reads it
MOST_PROGRAMS = 128  # keep a large GPU busy
MOST_PARTS = 16  # of one row's keys
NOTHING = tl.constexpr(-1e30)  # logarithm of the sum of no weights; infinities have no difference


_only_compiles = ContextVar("only_compiles", default=False)


@contextmanager
def compiled_only() -> Iterator[None]:
    """Compile the kernels that are launched inside, in parallel and before the end, without running them.

    Raises the compiler's errors. Without this a kernel is compiled when it is first launched, one after the other.
    """
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads, triton.AsyncCompileMode(threads):
        token = _only_compiles.set(True)
        try:
            yield
        finally:
            _only_compiles.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument: Triton launches on the thread's current one."""
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
    """Each query's attention to its row's tokens up to itself: [rows, queries, heads, head_dim].

    query: [rows, heads, queries, head_dim]. rows: [rows], of the pool, whose layer's keys and values are read. positions:
    [rows, queries], contiguous. window: visible tokens, the query's own included. num_places: of a row; padding queries, at
    positions from there on, get zeros.
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
    """Queries, keys and dimensions of one program. num_queries: that read the same keys. element_size: bytes."""
    block_dim = max(SMALLEST_PRODUCT, triton.next_power_of_2(head_dim))
    most_queries = min(QUERIES_PER_PROGRAM, max(SMALLEST_PRODUCT, QUERIES_BYTES // (block_dim * element_size)))
    block_queries = min(most_queries, max(SMALLEST_PRODUCT, triton.next_power_of_2(num_queries)))
    return block_queries, min(128, max(SMALLEST_PRODUCT, KEYS_BYTES // (block_dim * element_size))), block_dim


def num_parts_of(num_programs: int, num_places: int) -> int:
    """Parts, a power of two, into which a row's keys are split. num_programs: without parts. num_places: of a row."""
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
    """One program a row, head of keys, block_queries of the queries that read them, and part of the keys.

    output: [parts, rows, queries, heads, head_dim], and sums [parts, rows, queries, heads]: logarithms of the sums of the
    parts' weights, unused where there is one part.
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
    """One program a query and head, `count` in all: what its parts found, by their shares of all weights."""
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
    """Weighted sum of the values that each query sees in a part, and of the weights; softmax as it goes along.

    The third result is the largest score, which both sums are relative to.
    """
    dims = tl.arange(0, q.shape[1])
    is_dim = dims < head_dim
    end = tl.max(position, axis=0) + 1
    start = 0
    if has_window:
        # Only queries with a place count; without any, nothing is read.
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
        # A query that has seen nothing yet has no best score to subtract.
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
