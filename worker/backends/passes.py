"""A pass over ragged rows: its rows, their tokens, and the wanted logits. Independent of backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from speclen.worker.backends.kv_cache import LayerShape
from speclen.worker.models.upload import upload


class StepRows:
    """Rows first_row, first_row + 1, ... in one step: column c of row r is its token at place starts[r] + c.

    All passes of a step use some of the columns: `shared` is where a backend caches what they share. starts: [rows], int64,
    on the host.
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
        """Tokens of the longest row, that of the last column included."""
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
    """Rows of a pass with equally many tokens.

    ids: [rows, queries]. column: of `rows`, of the first token. num_logits: wanted after the last so many.
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

    rows: [n] of the pool, in any order. Row rows[r] has counts[r] tokens, at positions starts[r], starts[r] + 1, ...; ids:
    [sum of counts], row after row. num_logits: [n], wanted after the last so many of each.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ids: torch.Tensor
    num_logits: np.ndarray

    @classmethod
    def of(cls, part: PassPart) -> RaggedPart:
        """The same rows and tokens, one by one."""
        rows, every = part.rows, np.ones(part.rows.num_rows, np.int64)
        numbers = np.arange(rows.first_row, rows.first_row + rows.num_rows)
        starts, counts = rows.starts + part.column, every * part.num_queries
        return cls(numbers, starts, counts, part.ids.reshape(-1), every * part.num_logits)


# Widths of padded proposals; beyond the last, multiples of it.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def padded_width(num_proposed: int) -> int:
    """Columns to which proposals of different lengths are padded: rounded up, so that few shapes occur."""
    return next((width for width in WIDTHS if width >= num_proposed), -(-num_proposed // WIDTHS[-1]) * WIDTHS[-1])


def equal_parts(parts: Sequence[PassPart | RaggedPart]) -> list[PassPart]:
    """The parts of a pass, none of which may be ragged."""
    equal = [part for part in parts if isinstance(part, PassPart)]
    assert len(equal) == len(parts), "only models that are `ragged` take RaggedParts"
    return equal


def prompt_part(row: int, ids: Sequence[int], start: int, device: torch.device) -> PassPart:
    """One row's tokens start, start + 1, ...; the logits wanted follow the last one."""
    rows = StepRows(np.array([start]), len(ids), device, first_row=row)
    return PassPart(rows, upload(np.array([ids]), device), num_logits=1)


class RowStore(Protocol):
    """Keys and values of the rows. Callers know how many tokens of a row are valid."""

    num_rows: int
    device: torch.device
    dtype: torch.dtype
    shapes: tuple[LayerShape, ...]
    num_looked_up_tokens: int  # of prompts, looked up in the prefix cache
    num_reused_tokens: int  # found there

    def begin(self, row: int, ids: Sequence[int]) -> int:
        """Start an empty row with the cached prefix of the tokens `ids`; returns the length of that."""

    def remember(self, row: int, ids: Sequence[int]) -> None:
        """Let the prefix cache, if there is one, share the row's tokens `ids` with later rows."""

    def forget(self) -> None:
        """Empty the prefix cache: for measurements with repeated prompts, while nothing runs."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Start a row with the first `length` tokens of another."""

    def move(self, source: int, target: int, length: int) -> None:
        """Give a row the first `length` tokens of another, which is released."""

    def swap(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchange two rows of the given lengths."""

    def clear_beyond(self, row: int, length: int) -> None:
        """Clear what was written beyond the row's first `length` tokens, since it may not be finite."""

    def release(self, row: int) -> None:
        """Empty the row."""

    def num_bytes_held(self) -> int:
        """Memory behind the rows."""


class PassModel(Protocol):
    """A model and its rows. Positions from max_context_length on are clamped to the last; their results are unused.

    ragged: True if passes take RaggedParts, which cost what their tokens cost; their logits are [all wanted, vocab].
    num_first_uses: passes so far that compiled or recorded something; steps with one are excluded samples. slow_changes:
    True if a pass takes much longer when its number of tokens differs from the one before. asynchronous: True if `forward`
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
        """Compute with that many CPU threads from the next pass on."""


@runtime_checkable
class HostModel(PassModel, Protocol):
    """A model whose logits lie in the host's memory, for numpy."""

    def host_logits(self, rows: StepRows, ids: np.ndarray, num_logits: int, column: int = 0) -> np.ndarray:
        """As `forward` of one part, as float32 arrays: ids [rows, queries], logits [rows, num_logits, vocab]."""
