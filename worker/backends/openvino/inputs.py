"""Inputs of a compiled model, and the order of a pass's tokens in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov

from speclen.worker.backends.openvino.blocks import begins_of


class Input:
    """An input tensor of the compiled model, filled only when its array changes.

    Arrays are compared by identity: callers must not change them afterwards.
    """

    def __init__(self, kind: ov.Type, rank: int) -> None:
        self.tensor = ov.Tensor(kind, [1] * rank)
        self._view = self.tensor.data
        self._filled: object = None

    def fill(self, array: np.ndarray | int) -> None:
        if array is self._filled:
            return
        if isinstance(array, np.ndarray) and array.shape != self._view.shape:
            self.tensor.shape = array.shape
            self._view = self.tensor.data
        self._view[...] = array
        self._filled = array


@dataclass(frozen=True, slots=True)
class Layout:
    """Order of the tokens of a pass, row after row.

    counts, begins: tokens of each row, and the place of its first one. rows, offsets: of each token, its row and its place
    among the row's tokens. wanted: places of tokens whose logits are wanted. is_single: True if every row has one token.
    """

    counts: np.ndarray
    begins: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    wanted: np.ndarray
    is_single: bool


@functools.lru_cache(maxsize=1024)
def layout_of(shapes: tuple[tuple[int, int, int], ...]) -> Layout:
    """shapes: rows, queries and wanted logits a row, of every part."""
    counts = np.concatenate([np.full(rows, queries) for rows, queries, _ in shapes])
    begins = begins_of(counts)
    ends = begins[1:].astype(np.int64)
    num_wanted = np.concatenate([np.full(rows, wanted) for rows, _, wanted in shapes])
    return Layout(
        counts,
        begins,
        np.repeat(np.arange(len(counts)), counts),
        np.concatenate([np.arange(count) for count in counts]),
        np.concatenate([np.arange(end - wanted, end) for end, wanted in zip(ends, num_wanted, strict=True)]),
        bool((counts == 1).all()),
    )


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
