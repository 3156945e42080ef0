"""A forward pass over ragged rows: its rows, their tokens, and the wanted logits. Independent of backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.models.devices import upload


class StepRows:
    """Rows first_row, first_row + 1, ... in one step. Column c of row r is its token at position starts[r] + c.

    Each pass of the step uses some of the columns. shared: a backend's cache of what these passes have in common. starts:
    [rows], int64, on the host.
    """

    def __init__(self, starts: np.ndarray, num_columns: int, device: torch.device, first_row: int = 0) -> None:
        self.starts = starts
        self.num_columns = num_columns
        self.device = device
        self.first_row = first_row
        self.num_rows = len(starts)
        self.shared: dict[Any, Any] = {}

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the longest row, including its last column."""
        return int(self.starts.max()) + self.num_columns

    @cached_property
    def common_start(self) -> int | None:
        """Position of the first column if it is the same in all rows, else None."""
        first = int(self.starts[0])
        return first if (self.starts == first).all() else None

    @cached_property
    def positions(self) -> torch.Tensor:
        """[rows, columns] on the device."""
        return upload(self.starts, self.device)[:, None] + torch.arange(self.num_columns, device=self.device)

    def first_rows(self, num_rows: int) -> StepRows:
        """The first rows alone."""
        if num_rows == self.num_rows:
            return self
        return StepRows(self.starts[:num_rows], self.num_columns, self.device, self.first_row)


@dataclass(frozen=True, slots=True)
class PassPart:
    """Rows of a pass that have equally many tokens.

    ids: [rows, queries]. column: of the first token, in `rows`. num_logits: number of last tokens whose logits are wanted.
    """

    rows: StepRows
    ids: torch.Tensor
    num_logits: int
    column: int = 0

    @property
    def num_queries(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class RaggedPart:
    """Rows of a pass with different numbers of tokens, for models that are `ragged`.

    rows: [n], rows of the cache in any order. Row rows[r] has counts[r] tokens, at positions starts[r], starts[r] + 1, ...
    ids: [sum of counts], row after row. num_logits: [n], number of last tokens of each row whose logits are wanted.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ids: torch.Tensor
    num_logits: np.ndarray

    @classmethod
    def of(cls, part: PassPart) -> RaggedPart:
        """The same rows and tokens as a ragged part."""
        rows, every = part.rows, np.ones(part.rows.num_rows, np.int64)
        numbers = np.arange(rows.first_row, rows.first_row + rows.num_rows)
        starts, counts = rows.starts + part.column, every * part.num_queries
        return cls(numbers, starts, counts, part.ids.reshape(-1), every * part.num_logits)


# Widths to which proposals are padded; beyond the last one, its multiples.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def padded_width(num_proposed: int) -> int:
    """Width to which proposals are padded: num_proposed rounded up, so that few shapes occur."""
    return next((width for width in WIDTHS if width >= num_proposed), -(-num_proposed // WIDTHS[-1]) * WIDTHS[-1])


def equal_parts(parts: Sequence[PassPart | RaggedPart]) -> list[PassPart]:
    """The parts of a pass, after an assertion that none is ragged."""
    equal = [part for part in parts if isinstance(part, PassPart)]
    assert len(equal) == len(parts), "only models that are `ragged` take RaggedParts"
    return equal


def prompt_part(row: int, ids: Sequence[int], start: int, device: torch.device) -> PassPart:
    """Tokens of one row from position `start` on. The logits after the last one are wanted."""
    rows = StepRows(np.array([start]), len(ids), device, first_row=row)
    return PassPart(rows, upload(np.array([ids]), device), num_logits=1)


class RowStore(Protocol):
    """Keys and values of the rows: a KV cache. Callers keep track of how many tokens of a row are valid."""

    num_rows: int
    device: torch.device
    dtype: torch.dtype
    shapes: tuple[LayerShape, ...]
    num_looked_up_tokens: int  # of prompts, looked up in the prefix cache
    num_reused_tokens: int  # found there

    def begin(self, row: int, ids: Sequence[int]) -> int:
        """Start an empty row with the longest cached prefix of the tokens `ids`, and return its length."""

    def remember(self, row: int, ids: Sequence[int]) -> None:
        """Add the row's tokens `ids` to the prefix cache, if there is one."""

    def forget(self) -> None:
        """Empty the prefix cache: for measurements with repeated prompts. Only while nothing runs."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Start a row with the first `length` tokens of another."""

    def move(self, source: int, target: int, length: int) -> None:
        """Move the first `length` tokens of a row to another row."""

    def swap(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchange two rows of the given lengths."""

    def clear_beyond(self, row: int, length: int) -> None:
        """Clear what was written beyond the first `length` tokens of a row, since it may be NaN or infinite."""

    def release(self, row: int) -> None:
        """Empty the row."""

    def num_bytes_held(self) -> int:
        """Memory behind the rows."""


class PassModel(Protocol):
    """A model with the KV cache of its rows. Results at positions from max_context_length on are undefined.

    ragged: True if `forward` accepts RaggedParts, without padding; their logits are [all wanted, vocab]. num_first_uses:
    number of passes so far that compiled or captured something, which makes their step an excluded sample. slow_changes:
    True if a pass takes much longer when its number of tokens differs from the pass before. asynchronous: True if `forward`
    returns before the device is done.
    """

    device: torch.device
    max_context_length: int
    num_first_uses: int
    ragged: bool
    slow_changes: bool
    asynchronous: bool

    @property
    def pool(self) -> RowStore:
        """The rows."""

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """Logits [rows, num_logits, vocab] of each part, valid until the next call."""

    def use_threads(self, num_threads: int) -> None:
        """Use this number of CPU threads from the next pass on."""


@runtime_checkable
class HostModel(PassModel, Protocol):
    """A model whose logits are in the host's memory, for numpy."""

    def host_logits(self, rows: StepRows, ids: np.ndarray, num_logits: int, column: int = 0) -> np.ndarray:
        """As `forward` of one part, as float32 arrays: ids [rows, queries], logits [rows, num_logits, vocab]."""
