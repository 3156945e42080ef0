"""A model compiled by OpenVINO, with the keys and values of its rows in blocks: a `PassModel`.

Weights lie in pages of 2 MiB where the system allows it. A pass reads every weight once; each page of 4 KiB needs a look-up
in the page tables, two in a virtual machine, and ends a hardware prefetch. The library that allocates the weights does not
ask for larger pages, so its memory is collapsed afterwards (madvise(2), MADV_COLLAPSE, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch

from speclen.worker.backends.kv_cache import free_memory
from speclen.worker.backends.openvino.blocks import BlockPool, begins_of
from speclen.worker.backends.openvino.convert import BLOCK_INPUTS, TOKEN_INPUTS, cache_names
from speclen.worker.backends.passes import PassPart, RaggedPart, StepRows

log = logging.getLogger(__name__)

HUGE = 2 * 2**20
MADV_COLLAPSE = 25
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPU = torch.device("cpu")
PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
CACHE_TYPES = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}
# Matrix products in bfloat16 take longer with one or two tokens than with three to six (docs/explanation/engine.md), so a
# pass of up to SLOW_TOKENS is padded to FILLED_TOKENS.
SLOW_TOKENS, FILLED_TOKENS = 2, 4
# A pass with another number of tokens than the one before takes as long as one with 12 to 25 more tokens, since every
# operation is prepared again (docs/explanation/engine.md). So a pass that lacks up to MISSING_TOKENS of the last number is
# padded to it, for up to FILLED_PASSES in a row.
MISSING_TOKENS, FILLED_PASSES = 8, 8
FILLER = np.arange(FILLED_TOKENS + MISSING_TOKENS)  # ids and positions of padding tokens
# Compiled models to keep, each for a number of threads and with a copy of the weights.
MOST_COPIES = 3
MEMORY_MARGIN = 4  # free memory, in multiples of the weights, that another copy of them requires


class NewMemory:
    """The memory that the process allocates from now on."""

    def __init__(self) -> None:
        self._before = _pages() if _allowed() else None

    def use_huge_pages(self) -> None:
        """Collapse the part in use into huge pages, if the system allows it."""
        if self._before is None:
            return
        pages = _pages() - self._before
        failed = [error for page in pages if (error := _collapse(page))]
        if failed:  # unwritten parts, or no memory
            log.debug("%d of %d ranges of 2 MiB stay in small pages: %s", len(failed), len(pages), failed[-1])


def _pages() -> set[int]:
    """Addresses of all aligned ranges of 2 MiB in private anonymous writable memory."""
    maps = Path("/proc/self/maps").read_text("utf-8", errors="replace")  # with files' names in it
    lines = [line.split() for line in maps.splitlines()]
    found = [fields[0].split("-") for fields in lines if fields[1] == "rw-p" and fields[4] == "0"]
    ranges = [(int(begin, 16), int(end, 16)) for begin, end in found]
    return {page for begin, end in ranges for page in range(-(-begin // HUGE) * HUGE, end - HUGE + 1, HUGE)}


def _allowed() -> bool:
    try:
        return "[never]" not in SETTING.read_text("ascii")
    except OSError:
        return False


def _collapse(page: int) -> str | None:
    """Collapse the memory at an address into a huge page. Returns the system's error, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), MADV_COLLAPSE) == 0:
        return None
    return os.strerror(ctypes.get_errno())


class Input:
    """An input tensor of the compiled model, which is filled only when its array changes.

    Arrays are compared by identity, so callers must not modify an array that they passed.
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


@functools.lru_cache(maxsize=1024)
def layout_of(num_rows: int, num_queries: int, num_logits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Layout of rows with equally many tokens: beginning of each row, offsets within a row, indices of wanted logits."""
    begins, places = begins_of(np.full(num_rows, num_queries)), np.arange(num_rows * num_queries)
    return begins, places[:num_queries], places.reshape(num_rows, -1)[:, -num_logits:].ravel()


class OpenVinoModel:
    """A `HostModel` on OpenVINO. model, weights: from `convert`. num_weight_bytes: size of the model's weights.

    A compiled model has a fixed number of threads, and a copy of the weights in the layout of its kernels.
    """

    device = CPU
    ragged = True
    slow_changes = True  # every operation is prepared again
    asynchronous = False

    def __init__(
        self,
        model: ov.Model,
        weights: Sequence[torch.Tensor],
        num_weight_bytes: int,
        pool: BlockPool,
        max_context_length: int,
    ) -> None:
        self.pool = pool
        self.max_context_length = max_context_length
        self.num_first_uses = 0
        self._model = model
        self._weights = weights  # compiled models read them at their first pass
        self._num_weight_bytes = num_weight_bytes
        self._threads = torch.get_num_threads()
        self._inputs = {name: Input(ov.Type.i64, 1) for name in TOKEN_INPUTS}
        self._inputs |= {name: Input(ov.Type.i32, 1) for name in BLOCK_INPUTS[:-1]}
        self._inputs[BLOCK_INPUTS[-1]] = Input(ov.Type.i32, 0)
        self._slow_tokens = SLOW_TOKENS if pool.dtype == torch.bfloat16 else 0
        self._size, self._num_filled = 0, 0  # tokens of the last pass; passes in a row that were padded to that number
        self._extended: dict[str, tuple[np.ndarray, int, np.ndarray]] = {}  # by input: array, last element, both joined
        self._new_memory: dict[int, NewMemory] = {}  # by threads, of compiled models that have not run yet
        self._requests = {self._threads: self._make_request(self._threads)}

    def _make_request(self, num_threads: int) -> ov.InferRequest:
        """Compile the model to compute, and to keep keys and values, in the pool's dtype."""
        precision = PRECISIONS[self.pool.dtype]
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # else it is u8
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # a thread whose core is taken by another process must be able to migrate
        }
        self._new_memory[num_threads] = NewMemory()
        request = ov.Core().compile_model(self._model, "CPU", options).create_infer_request()
        for name, cache in zip(cache_names(len(self.pool.shapes)), self.pool.caches, strict=True):
            request.set_tensor(name, ov.Tensor(cache, list(cache.shape), CACHE_TYPES[self.pool.dtype]))
        for name, one in self._inputs.items():
            request.set_tensor(name, one.tensor)  # Filled and cut to size before every pass.
        return request

    def use_threads(self, num_threads: int) -> None:
        """As PassModel. Raises MemoryError, and changes nothing, if another copy of the weights does not fit."""
        if num_threads not in self._requests:
            if free_memory(CPU) < MEMORY_MARGIN * self._num_weight_bytes:
                raise MemoryError(f"no memory to compile for {num_threads} threads: {self._threads} stay")
            self._requests[num_threads] = self._make_request(num_threads)
            self._threads = num_threads
            self._lay_out_weights()
        self._threads = num_threads
        # The first one, for an idle machine, is kept.
        spare = [each for each in list(self._requests)[1:] if each != num_threads]
        for old in spare[: max(0, len(self._requests) - MOST_COPIES)]:
            del self._requests[old]
            self._new_memory.pop(old, None)

    def _lay_out_weights(self) -> None:
        """Run the first pass, which converts the weights to the layout of the kernels, on padding tokens."""
        tokens = FILLER[:FILLED_TOKENS]
        self._infer(
            input_ids=tokens,
            position_ids=tokens,
            wanted=FILLER[:1],
            past_lens=FILLER[:1],
            subsequence_begins=np.array([0, FILLED_TOKENS]),
            block_indices=np.array([self.pool.spare_block]),
            block_indices_begins=FILLER[:2],
            max_context_len=FILLED_TOKENS,
        )

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """As PassModel."""
        if len(parts) == 1 and isinstance(part := parts[0], PassPart):
            return [torch.from_numpy(self._logits_of(part.rows, part.ids.numpy(), part.num_logits, part.column))]
        ragged = [RaggedPart.of(part) if isinstance(part, PassPart) else part for part in parts]
        past, counts = joined([part.starts for part in ragged]), joined([part.counts for part in ragged])
        num_wanted = joined([part.num_logits for part in ragged])
        begins = begins_of(counts)
        rows = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(rows)) - begins[rows]
        ends = past + counts
        blocks, block_begins = self.pool.reach_rows(joined([part.rows for part in ragged]), ends)
        logits = self._infer(
            input_ids=joined([part.ids.numpy() for part in ragged]),
            position_ids=np.minimum(past[rows] + offsets, self.max_context_length - 1),
            wanted=np.flatnonzero(offsets >= (counts - num_wanted)[rows]),
            past_lens=past,
            subsequence_begins=begins,
            block_indices=blocks,
            block_indices_begins=block_begins,
            max_context_len=int(ends.max()),
        )
        pieces = torch.from_numpy(logits).split([int(part.num_logits.sum()) for part in ragged])
        return [
            piece if isinstance(part, RaggedPart) else piece.unflatten(0, (len(part.ids), -1))
            for piece, part in zip(pieces, parts, strict=True)
        ]

    def host_logits(self, rows: StepRows, ids: np.ndarray, num_logits: int, column: int = 0) -> np.ndarray:
        """As HostModel. `forward` does not call it, so that timing both counts each pass once."""
        return self._logits_of(rows, ids, num_logits, column)

    def _logits_of(self, rows: StepRows, ids: np.ndarray, num_logits: int, column: int) -> np.ndarray:
        begins, offsets, wanted = layout_of(*ids.shape, num_logits)
        past = rows.starts + column
        ends = past + ids.shape[1]
        blocks, block_begins = self.pool.reach(rows.first_row, ends)
        positions, longest = past if ids.shape[1] == 1 else (past[:, None] + offsets).reshape(-1), int(ends.max())
        if longest > self.max_context_length:
            positions = np.minimum(positions, self.max_context_length - 1)
        logits = self._infer(
            input_ids=ids.reshape(-1),
            position_ids=positions,
            wanted=wanted,
            past_lens=past,
            subsequence_begins=begins,
            block_indices=blocks,
            block_indices_begins=block_begins,
            max_context_len=longest,
        )
        return logits.reshape(rows.num_rows, num_logits, -1)

    def _size_of(self, num_tokens: int) -> int:
        """Number of tokens of the next pass, including padding."""
        size = FILLED_TOKENS if num_tokens <= self._slow_tokens else num_tokens
        if size < self._size <= size + MISSING_TOKENS and self._num_filled < FILLED_PASSES:
            self._num_filled += 1
        else:
            self._size, self._num_filled = size, 0
        return self._size

    def _filled_up(self, inputs: dict[str, Any], size: int) -> dict[str, Any]:
        """The inputs with an additional row of padding tokens, in the spare block."""
        more = FILLER[: size - len(inputs["input_ids"])]
        news = {"input_ids": more, "position_ids": more, "past_lens": FILLER[:1]}
        lasts = {
            "subsequence_begins": size,
            "block_indices": self.pool.spare_block,
            "block_indices_begins": len(inputs["block_indices"]) + 1,
        }
        return (
            inputs
            | {name: np.concatenate((inputs[name], array)) for name, array in news.items()}
            | {name: self._with_last(name, inputs[name], last) for name, last in lasts.items()}
            | {"max_context_len": max(inputs["max_context_len"], len(more))}
        )

    def _with_last(self, name: str, array: np.ndarray, last: int) -> np.ndarray:
        """The array with one more element: the same object while both are the same, so that it is not copied again."""
        known, known_last, extended = self._extended.get(name, (None, 0, array))
        if known is not array or known_last != last:
            extended = np.append(array, last)
            self._extended[name] = array, last, extended
        return extended

    def _infer(self, **inputs: Any) -> np.ndarray:
        """Run a pass. Returns logits [wanted, vocab] in the request's own memory. inputs: arrays, and one integer."""
        num_tokens = len(inputs["input_ids"])
        if (size := self._size_of(num_tokens)) > num_tokens:
            inputs = self._filled_up(inputs, size)
        for name, array in inputs.items():
            self._inputs[name].fill(array)
        # By default the wrapper copies the logits, and looking up outputs by index takes longer.
        (logits,) = self._requests[self._threads].infer(share_outputs=True).values()
        # A new number of tokens or logits is not a first use: it costs the same as every change of size.
        if (memory := self._new_memory.pop(self._threads, None)) is not None:
            self.num_first_uses += 1
            memory.use_huge_pages()  # the first pass has converted the weights
        return logits


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
