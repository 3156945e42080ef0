"""The KV cache of torch: keys and values of every row of a batch, one pool per model. `openvino/blocks.py` shares
LayerShape and `reserve`.

Layout. Every layer has one tensor [rows, 2, kv_heads, max_length, head_dim] (keys, then values), so that attention reads
rows 0..b-1 and tokens 0..n-1 as a strided view, without a gather or a block table. A row keeps its place whatever the
lengths of the others.

Memory. On Linux CPUs the tensors lie in one anonymous mapping that only reserves addresses. The kernel backs a page when a
token is first written to it, and `release` returns a row's pages. So memory follows the tokens that each row holds, in
units of one page per head (`allocation_unit` tokens), while all views stay valid; a padded pool would take rows x longest
row. On other devices the pool is allocated in full, which also gives captured graphs fixed addresses.

Rejected tokens are rolled back by the caller's length of the row; whatever lies beyond it is overwritten by the next tokens.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from speclen.worker.models import machine

MAP_NORESERVE = 0x4000  # Linux; the mmap module names it only from Python 3.13 on.


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key-value heads of a layer, and elements per head. window: tokens that a query attends to; None for all."""

    kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Number of elements of a token's key and value."""
        return 2 * self.kv_heads * self.head_dim


class KVPool:
    """A `RowStore` of `num_rows` rows of up to `max_length` tokens. Callers keep the length of each row.

    layers: views [rows, 2, kv_heads, max_length, head_dim], one per layer. max_length is rounded up to the allocation
    unit. Raises MemoryError with one sentence if the memory cannot be reserved.
    """

    num_looked_up_tokens = num_reused_tokens = 0  # there is no prefix cache

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_rows = num_rows
        self.dtype = dtype
        self.device = device
        # Tokens of one head that fill whole pages, for every layer.
        head_bytes = {shape.head_dim * dtype.itemsize for shape in shapes}
        self.allocation_unit = math.lcm(*(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, size) for size in head_bytes))
        self.max_length = math.ceil(max_length / self.allocation_unit) * self.allocation_unit
        num_elements = sum(shape.elements_per_token for shape in shapes)
        self.bytes_per_token = num_elements * dtype.itemsize
        self._touched = np.zeros(num_rows, np.int64)  # tokens of each row that have been written since its last release
        flat, self._mapping = self._allocate(num_rows * self.max_length * num_elements)
        # [layers, rows, 2, kv_heads, max_length, head_dim] of consecutive layers with one shape, copied as one.
        self._alike: list[torch.Tensor] = []
        end = 0
        for (kv_heads, head_dim), group in itertools.groupby(shapes, lambda shape: (shape.kv_heads, shape.head_dim)):
            view = (len(list(group)), num_rows, 2, kv_heads, self.max_length, head_dim)
            start, end = end, end + math.prod(view)
            self._alike.append(flat[start:end].view(view))
        self.layers = [layer for layers in self._alike for layer in layers]

    def _allocate(self, num_elements: int) -> tuple[torch.Tensor, mmap.mmap | None]:
        if self.device.type == "cpu" and sys.platform.startswith("linux"):
            mapping = reserve(num_elements * self.dtype.itemsize, self.num_rows, self.max_length)
            return torch.frombuffer(mapping, dtype=self.dtype), mapping
        try:
            return torch.zeros(num_elements, dtype=self.dtype, device=self.device), None
        except RuntimeError as error:
            raise no_room(num_elements * self.dtype.itemsize, self.num_rows, self.max_length) from error

    def note_written(self, first_row: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Note that tokens 0..lengths[r]-1 of rows first_row + r were written, including rejected ones."""
        touched = self._touched[first_row : first_row + len(lengths)]
        np.maximum(touched, lengths, out=touched)

    def begin(self, row: int, ids: Sequence[int]) -> int:
        """As RowStore: always 0, since rows do not share memory."""
        return 0

    def remember(self, row: int, ids: Sequence[int]) -> None:
        """As RowStore."""

    def forget(self) -> None:
        """As RowStore."""

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row over another row, and release the source."""
        self.copy(source, target, length)
        self.release(source)

    @torch.inference_mode()  # tensors made in inference mode cannot be written outside of it
    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of a row over another row."""
        for layers in self._alike:
            layers[:, target, :, :, :length] = layers[:, source, :, :, :length]
        self.note_written(target, [length])

    @torch.inference_mode()
    def swap(self, first: int, second: int, first_length: int, second_length: int) -> None:
        """Exchange two rows, including what was written beyond their lengths."""
        most = int(max(self._touched[first], self._touched[second], first_length, second_length))
        for layers in self._alike:
            kept = layers[:, first, :, :, :most].clone()
            layers[:, first, :, :, :most] = layers[:, second, :, :, :most]
            layers[:, second, :, :, :most] = kept
        self.note_written(first, [most])
        self.note_written(second, [most])

    @torch.inference_mode()
    def clear_beyond(self, row: int, length: int) -> None:
        """As RowStore: attention reads masked places, too, and 0 times infinity is NaN."""
        for layers in self._alike:
            layers[:, row, :, :, length : int(self._touched[row])].zero_()

    @torch.inference_mode()
    def release(self, row: int) -> None:
        """Clear the row, and return its memory to the system where possible.

        Attention also reads masked places beyond the end of a row, and 0 times infinity is NaN. Without clearing, an
        overflow in one request would break the row for the next.
        """
        if self._mapping is None:
            for layers in self._alike:
                layers[:, row, :, :, : int(self._touched[row])].zero_()
        elif self._touched[row]:
            start = 0
            for shape in self.shapes:
                size = 2 * shape.kv_heads * self.max_length * shape.head_dim * self.dtype.itemsize
                self._mapping.madvise(mmap.MADV_DONTNEED, start + row * size, size)
                start += self.num_rows * size
        self._touched[row] = 0

    def num_bytes_held(self) -> int:
        """Memory in use by the rows: whole allocation units on Linux CPUs, otherwise the whole pool."""
        if self._mapping is None:
            return self.num_rows * self.max_length * self.bytes_per_token
        unit = self.allocation_unit
        return int((-(-self._touched // unit) * unit).sum()) * self.bytes_per_token


def reserve(num_bytes: int, num_rows: int, max_length: int) -> mmap.mmap:
    """Reserve addresses on Linux; memory is allocated when it is written to. Raises MemoryError with one sentence."""
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise no_room(num_bytes, num_rows, max_length) from error
    with contextlib.suppress(OSError):  # The kernel may have no huge pages.
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping


def no_room(num_bytes: int, num_rows: int, max_length: int) -> MemoryError:
    return MemoryError(
        f"{num_rows} sequences of {max_length} tokens need {num_bytes / 2**30:.1f} GiB of KV memory, more than there is: "
        "lower --max-batch-size"
    )


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still use on the device."""
    if device.type == "cuda":
        gc.collect()  # An unused engine in a reference cycle may still hold most of the memory.
        torch.cuda.empty_cache()  # return the memory of freed tensors
        return torch.cuda.mem_get_info(device)[0]
    for line in machine.lines_of("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *machine.free_bytes()])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
