"""Prefix cache: full blocks by the tokens they hold, so that sequences with the same beginning share them.

The contents of a block depend on all tokens before it, so its key is its own tokens and the block before. Keys are
compared whole: texts are never confused. The least recently used block is evicted first, and of a text its last one, since
a match marks blocks from the last to the first.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

BLOCK_TOKENS = 32  # what OpenVINO's attention on a CPU reads at a time
NOBODY = 0  # the block before the first one


class PrefixCache:
    """Least recently used cache of at most `max_blocks` blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._names = itertools.count(NOBODY + 1)
        # (name of the block before, the block's tokens) → (its own name, the block)
        self._known: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()

    def match(self, ids: Sequence[int]) -> list[int]:
        """The longest known run of blocks that hold the first tokens of `ids`."""
        keys, blocks, before = [], [], NOBODY
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
        """Note that blocks hold the tokens `ids`. Returns the new ones among them, and the evicted ones."""
        keys, new, before = [], [], NOBODY
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
        """Empty the cache; returns its blocks."""
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
