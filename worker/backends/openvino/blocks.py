"""A paged KV cache: keys and values in blocks at fixed addresses, and a table of blocks per row. Independent of OpenVINO.

Layout. Every layer has two arrays [blocks, kv_heads, BLOCK_TOKENS, head_dim], for keys and values, and a block has the same
index in all of them. A row's table lists the blocks of its tokens, in order, so exchanging rows exchanges tables. Rows with
the same beginning share full blocks, which are never written again; so do the prefix cache and later rows.

Memory. As in `kv_cache`, addresses are reserved and the kernel backs the pages that are written. Free blocks are reused, the
last freed first; the memory of more than FREE_BLOCKS free blocks is returned.
"""

from __future__ import annotations

import itertools
import mmap
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from speclen.worker.backends.kv_cache import LayerShape, reserve

BLOCK_TOKENS = 32  # the block size of OpenVINO's attention on a CPU
EMPTY = 0  # name of the empty text, before the first block
FREE_BLOCKS = 64  # that keep their memory, so that new rows need not ask the kernel for every block


class BlockPool:
    """A `RowStore` of `num_rows` rows of up to `max_length` tokens, in blocks.

    max_cached_tokens: capacity of the prefix cache, on top of the rows. num_looked_up_tokens, num_reused_tokens: its queries
    and hits. caches: arrays [blocks, kv_heads, BLOCK_TOKENS, head_dim], key and value of every layer; bfloat16 as uint16.
    Raises MemoryError with one sentence if the memory cannot be reserved.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_rows: int,
        max_length: int,
        dtype: torch.dtype,
        max_cached_tokens: int = 0,
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_rows = num_rows
        self.max_length = max_length
        self.dtype = dtype
        row_blocks = -(-max_length // BLOCK_TOKENS)
        num_cached = max_cached_tokens // BLOCK_TOKENS
        # The last block belongs to no row: padding tokens are written to it.
        self.spare_block = num_rows * row_blocks + num_cached
        self.num_blocks = self.spare_block + 1
        self.bytes_per_token = sum(shape.elements_per_token for shape in shapes) * dtype.itemsize
        self._mapping = reserve(self.num_blocks * BLOCK_TOKENS * self.bytes_per_token, num_rows, max_length)
        self.caches = self._make_caches()
        self._tables = np.zeros((num_rows, row_blocks), np.int32)
        self._held = np.zeros(num_rows, np.int64)  # blocks of each row
        self._owners = np.zeros(
            self.num_blocks, np.int32
        )  # reference counts: rows with the block, and the prefix cache
        self._prefixes = PrefixCache(num_cached)
        self.num_looked_up_tokens = self.num_reused_tokens = 0
        self._free: list[int] = []  # free blocks with memory
        self._bare: list[int] = []  # free blocks without
        self._num_touched = 0  # blocks from here on were never used
        self._reached_for: tuple[int, bytes] | None = (
            None  # last arguments of `reach`; None once its answer may be wrong
        )
        self._reached = np.zeros(0, np.int32), np.zeros(1, np.int32)

    def _make_caches(self) -> list[np.ndarray]:
        kind = np.dtype(np.float32 if self.dtype == torch.float32 else np.uint16)
        shapes = [(self.num_blocks, s.kv_heads, BLOCK_TOKENS, s.head_dim) for s in self.shapes for _ in range(2)]
        sizes = [int(np.prod(shape)) for shape in shapes]
        flat = np.frombuffer(self._mapping, kind)
        ends = list(itertools.accumulate(sizes))
        return [flat[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]

    def reach(self, first_row: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Extend rows first_row, ... to ends[r] tokens.

        Returns their blocks, row after row, and the index at which each row begins, as int32. The arrays are the same
        objects until a row needs another block: for a single row, in 31 of 32 successive passes.
        """
        needed = (ends + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
        asked = first_row, needed.tobytes()
        if asked != self._reached_for:
            self._reached = self.reach_rows(np.arange(first_row, first_row + len(ends)), ends)
            self._reached_for = asked
        return self._reached

    def reach_rows(self, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `reach`, for rows in any order."""
        needed = -(-ends // BLOCK_TOKENS)
        if (needed > self._held[rows]).any():
            self._grow(rows.tolist(), needed)
        tables = self._tables[rows, : needed.max()]
        return tables[np.arange(tables.shape[1]) < needed[:, None]], begins_of(needed)

    def _grow(self, rows: Iterable[int], needed: np.ndarray) -> None:
        for row, blocks in zip(rows, needed.tolist(), strict=True):
            for place in range(self._held[row], blocks):
                block = self._take()
                self._owners[block] = 1
                self._tables[row, place] = block
            self._held[row] = max(self._held[row], blocks)

    def _take(self) -> int:
        if self._free or self._bare:
            return (self._free or self._bare).pop()
        self._num_touched += 1
        return self._num_touched - 1

    def begin(self, row: int, ids: Sequence[int]) -> int:
        """As RowStore."""
        self._reached_for = None
        blocks = self._prefixes.match(ids)
        self._tables[row, : len(blocks)] = blocks
        self._owners[blocks] += 1
        self._held[row] = len(blocks)
        self.num_looked_up_tokens += len(ids)
        self.num_reused_tokens += len(blocks) * BLOCK_TOKENS
        return len(blocks) * BLOCK_TOKENS

    def remember(self, row: int, ids: Sequence[int]) -> None:
        """As RowStore."""
        new, given_up = self._prefixes.add(ids, self._tables[row].tolist())
        self._owners[new] += 1
        self._disown(np.array(given_up, np.int64))

    def forget(self) -> None:
        """As RowStore."""
        self._reached_for = None
        self._disown(np.array(self._prefixes.clear(), np.int64))

    def copy(self, source: int, target: int, length: int) -> None:
        """As RowStore: full blocks are shared, the last one is copied."""
        self.release(target)
        full, rest = divmod(length, BLOCK_TOKENS)
        self._tables[target, :full] = self._tables[source, :full]
        self._owners[self._tables[source, :full]] += 1
        self._held[target] = full
        if rest:
            self._grow([target], np.array([full + 1]))
            for cache in self.caches:
                cache[self._tables[target, full]] = cache[self._tables[source, full]]

    def move(self, source: int, target: int, length: int) -> None:
        """As RowStore."""
        self.release(target)
        self.swap(source, target, length, 0)

    def swap(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """As RowStore."""
        self._reached_for = None
        for array in (self._tables, self._held):
            array[[first, second]] = array[[second, first]]

    def clear_beyond(self, row: int, length: int) -> None:
        """As RowStore: nothing reads beyond a row's end."""

    def release(self, row: int) -> None:
        """As RowStore."""
        self._reached_for = None
        blocks = self._tables[row, : self._held[row]]
        self._held[row] = 0
        self._disown(blocks)

    def _disown(self, blocks: np.ndarray) -> None:
        self._owners[blocks] -= 1
        self._free += blocks[self._owners[blocks] == 0][::-1].tolist()
        while len(self._free) > FREE_BLOCKS:
            self._hand_back(self._free.pop(0))

    def _hand_back(self, block: int) -> None:
        """Return a block's memory to the kernel, as far as it fills whole pages."""
        start = 0
        for cache in self.caches:
            size = cache[0].nbytes
            begin = -(-(start + block * size) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (start + (block + 1) * size) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            start += cache.nbytes
        self._bare.append(block)

    def num_bytes_held(self) -> int:
        """Memory of the rows without the prefix cache; shared blocks count once."""
        held = [self._tables[row, :blocks] for row, blocks in enumerate(self._held)]
        return len(np.unique(np.concatenate(held))) * BLOCK_TOKENS * self.bytes_per_token


def begins_of(counts: np.ndarray) -> np.ndarray:
    """Beginnings of consecutive runs of these lengths, followed by the end of the last one. int32, [runs + 1]."""
    begins = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins


class PrefixCache:
    """Prefix cache of at most `max_blocks` full blocks, which sequences with the same beginning share.

    The contents of a block depend on all tokens before it, so its key is its tokens and the block before it. Keys are
    compared in full, so different texts are never confused. The least recently used block is evicted first. Within a
    text that is the last block, since a match marks the blocks as used from the last to the first.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._names = itertools.count(EMPTY + 1)
        # (name of the block before, the block's tokens) → (its own name, the block)
        self._known: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()

    def match(self, ids: Sequence[int]) -> list[int]:
        """The cached blocks that hold the longest prefix of `ids`."""
        keys, blocks, before = [], [], EMPTY
        for tokens in _full_blocks(ids):
            key = before, tokens
            if key not in self._known:
                break
            before, block = self._known[key]
            keys.append(key)
            blocks.append(block)
        self._use(keys)
        return blocks

    def add(self, ids: Sequence[int], blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Add blocks that hold the tokens `ids`. Returns those that were new, and those that were evicted."""
        keys, new, before = [], [], EMPTY
        for tokens, block in zip(_full_blocks(ids), blocks, strict=False):
            key = before, tokens
            if key not in self._known:
                self._known[key] = next(self._names), block
                new.append(block)
            before = self._known[key][0]
            keys.append(key)
        self._use(keys)
        given_up = [self._known.popitem(last=False)[1][1] for _ in range(len(self._known) - self._max_blocks)]
        return new, given_up

    def clear(self) -> list[int]:
        """Empty the cache, and return its blocks."""
        blocks = [block for _, block in self._known.values()]
        self._known.clear()
        return blocks

    def _use(self, keys: list[tuple[int, bytes]]) -> None:
        for key in reversed(keys):
            self._known.move_to_end(key)


def _full_blocks(ids: Sequence[int]) -> list[bytes]:
    """The tokens of each full block."""
    full = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
    numbers = np.array(ids[:full], np.int32)
    return [numbers[at : at + BLOCK_TOKENS].tobytes() for at in range(0, full, BLOCK_TOKENS)]
