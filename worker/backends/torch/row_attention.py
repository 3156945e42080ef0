"""Rows of one pass as attention sees them: masks, places to write keys and values at, and groups of rows.

What all layers share is made once per pass: write positions, and one mask per sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speclen.worker.backends.kv_cache import KVPool

# torch's GPU kernel reads eight mask elements at once and checks strides, not where a column begins: with an odd number of
# tokens some columns end the process ("misaligned address"), others are copied.
GPU_MASK_MULTIPLE = 16


class StepMasks:
    """Additive masks of one step, for queries at given positions.

    positions: [rows, columns], where a column is one token position of each row. All passes of the step share the masks.
    """

    def __init__(self, positions: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> None:
        """num_tokens: most tokens that a pass reads, more than every position."""
        self.positions = positions
        self.num_tokens = num_tokens
        self.dtype = dtype
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """[rows, 1, columns, num_tokens or more]: 0 for visible tokens, else -inf.

        window: visible tokens, the query's own included.
        """
        mask = self._masks.get(window)
        if mask is None:
            device = self.positions.device
            multiple = 1 if device.type == "cpu" else GPU_MASK_MULTIPLE
            padded = -(-self.num_tokens // multiple) * multiple
            ages = self.positions[:, None, :, None] - torch.arange(padded, device=device)
            hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask
        return mask


class RowAttention:
    """One pass of one model over rows first_row, first_row + 1, ... of its pool.

    columns: of the masks, those of this pass. start: set if every row writes from that position on, so that writing is a
    plain copy.
    """

    def __init__(
        self,
        pool: KVPool,
        masks: StepMasks,
        columns: slice,
        first_row: int = 0,
        start: int | None = None,
    ) -> None:
        self.pool = pool
        self.masks = masks
        self.columns = columns
        self.first_row = first_row
        self.start = start
        self.positions = masks.positions[:, columns]
        self.num_rows, self.num_queries = self.positions.shape
        self._write_index: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._grouped: dict[tuple[int | None, int], torch.Tensor] = {}

    def write(self, layer: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [rows, kv_heads, queries, head_dim] at every row's positions."""
        if self.start is not None:
            rows = layer[self.first_row : self.first_row + self.num_rows]
            rows[:, 0, :, self.start : self.start + self.num_queries] = key
            rows[:, 1, :, self.start : self.start + self.num_queries] = value
            return
        head_dim = key.shape[-1]
        key_index, value_index = self._indices(key.shape[1])
        flat = layer.view(-1, head_dim)
        flat.index_copy_(0, key_index, key.reshape(-1, head_dim))
        flat.index_copy_(0, value_index, value.reshape(-1, head_dim))

    def _indices(self, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of keys and of values to write, in a layer seen as [rows * 2 * kv_heads * max_length, head_dim]."""
        cached = self._write_index.get(kv_heads)
        if cached is None:
            device, length = self.positions.device, self.pool.max_length
            heads = self._rows()[:, None] * (2 * kv_heads) + torch.arange(kv_heads, device=device)
            keys = (heads[:, :, None] * length + self.positions[:, None, :]).reshape(-1)
            cached = self._write_index[kv_heads] = (keys, keys + kv_heads * length)
        return cached

    def _rows(self) -> torch.Tensor:
        """[rows] of the pool."""
        return torch.arange(self.first_row, self.first_row + self.num_rows, device=self.positions.device)

    def read(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [rows, kv_heads, num_tokens, head_dim] of keys and values."""
        rows = layer[self.first_row : self.first_row + self.num_rows, :, :, : self.masks.num_tokens]
        return rows[:, 0], rows[:, 1]

    def mask(self, window: int | None, repeats: int) -> torch.Tensor:
        """[rows, 1, repeats * queries, num_tokens]: the queries' masks, repeated."""
        grouped = self._grouped.get((window, repeats))
        if grouped is None:
            grouped = self.masks.mask(window)[:, :, self.columns]
            if repeats > 1:
                rows, _, queries, tokens = grouped.shape
                grouped = grouped.expand(rows, repeats, queries, tokens).reshape(rows, 1, repeats * queries, tokens)
            grouped = self._grouped[window, repeats] = grouped[..., : self.masks.num_tokens]
        return grouped


class RecordedRows(RowAttention):
    """Rows in a recorded pass.

    rows: [rows], of the pool: 0, 1, ... unless our kernels attend, which can read any. num_places: of a row; positions from
    there on are padding.
    """

    def __init__(self, pool: KVPool, masks: StepMasks, rows: torch.Tensor, num_places: int) -> None:
        super().__init__(pool, masks, slice(None))
        self.rows = rows
        self.num_places = num_places

    def _rows(self) -> torch.Tensor:
        return self.rows


class PackedAttention:
    """One pass of one model over several groups of rows, whose tokens form one sequence.

    parts: the groups, their tokens row after row. num_padding: padding tokens at the end, which take no part in attention.
    """

    def __init__(self, parts: Sequence[RowAttention], num_padding: int = 0) -> None:
        self.parts = parts
        self.num_padding = num_padding

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[1, heads, tokens, head_dim] as the parts' [rows, heads, queries, head_dim]."""
        counts = [part.num_rows * part.num_queries for part in self.parts]
        *pieces, _ = tensor[0].split([*counts, self.num_padding], dim=1)
        return [
            piece.unflatten(1, (part.num_rows, part.num_queries)).transpose(0, 1)
            for piece, part in zip(pieces, self.parts, strict=True)
        ]

    def join(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The parts' [rows, queries, heads, head_dim] as [1, tokens, heads, head_dim]."""
        flat = [output.flatten(0, 1) for output in outputs]
        flat.append(flat[0].new_zeros(self.num_padding, *flat[0].shape[1:]))
        return torch.cat(flat)[None]
