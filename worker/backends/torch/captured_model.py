"""Forward passes captured once per shape and replayed: CUDA graphs on a GPU.

Launching the few hundred kernels of a small model's forward pass one by one takes several times as long as running them. A
captured pass is a single launch. Its memory is fixed: the pool, the inputs, which are copied in before a replay, and the
logits. All captures of a model share the memory of their logits, which stay valid until the model's next pass.

A shape is the number of rows, of queries per row, and of tokens that attention reads. Our own kernels read each row's
length, so with them the last number is constant. Rows and tokens are rounded up, so some dozens of captures suffice, and
most are made before serving. Padding rows write beyond the longest context.

Prompts are cut into blocks of BLOCK_TOKENS, so that prompts of any length need few shapes: a block is a row of a captured
pass, with the index of its row in the pool as an input. Without our kernels, prompts run without a capture.

`Recorder` is the interface to the device, so that everything else runs, and is tested, on any device.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from speclen.worker.backends.check import first_line
from speclen.worker.backends.passes import PassPart, RaggedPart, equal_parts
from speclen.worker.backends.torch.attention import RecordedRows, StepMasks
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.models.devices import upload

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
# Numbers of blocks in captured passes, for up to 256 tokens of prompts that may end within a block.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
MOST_BLOCKS = SIZES[-1]
SMALLEST_REACH = 128  # tokens that attention reads at least


@dataclass(frozen=True, slots=True)
class Recording:
    """A captured pass. replay: runs it again on the present inputs. logits: the result of the last replay."""

    replay: Callable[[], object]
    logits: torch.Tensor


class Recorder(Protocol):
    """Captures passes."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Capture `run`, which must always write its result to the same memory.

        The result may be wrong before the first replay.
        """


class RerunRecorder:
    """Recorder for devices without graphs: a replay runs the pass again, without any gain in speed."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        return Recording(run, run())


class GraphRecorder:
    """Captures CUDA graphs. They share one memory pool, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        with torch.cuda.device(self._device):
            # In their first runs libraries choose kernels and allocate workspaces, which a graph cannot contain.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # "thread_local": other threads may continue to use the device.
            with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                logits = run()
        return Recording(graph.replay, logits)


def is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out, by torch's error or the driver's message."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


class RecordedBlocks:
    """A captured pass of `num_blocks` blocks of prompts, and its inputs.

    num_places: positions of a row without the spare ones. ids: [1, blocks * BLOCK_TOKENS]. positions: [blocks,
    BLOCK_TOKENS], with `num_places` for padding. rows: [blocks], of the pool. last: [blocks], index in `ids` of the last
    token of each row. recording: set by the model.
    """

    recording: Recording

    def __init__(self, num_blocks: int, num_places: int, device: torch.device) -> None:
        self.num_places = num_places
        self.ids = torch.zeros(1, num_blocks * BLOCK_TOKENS, dtype=torch.long, device=device)
        # All in one tensor, for a single upload.
        self._ends = num_blocks * BLOCK_TOKENS, num_blocks * (BLOCK_TOKENS + 1)
        self._numbers = torch.zeros(num_blocks * (BLOCK_TOKENS + 2), dtype=torch.long, device=device)
        positions, self.rows, self.last = self._numbers.tensor_split(self._ends)
        self.positions = positions.fill_(num_places).view(num_blocks, BLOCK_TOKENS)

    def run(self, model: CachedModel) -> torch.Tensor:
        """Logits [blocks, vocab] after the tokens at `last`."""
        masks = StepMasks(self.positions, self.num_places, model.pool.dtype)
        attention = RecordedRows(model.pool, masks, self.rows, self.num_places)
        return model.run(self.ids, self.positions.view(1, -1), attention, self.last)[0]

    def replay(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits [rows, 1, vocab] of each part, valid until the next replay."""
        num_rows = self._fill(parts)
        self.recording.replay()
        return [*self.recording.logits[:num_rows, None].split([part.rows.num_rows for part in parts])]

    def _fill(self, parts: Sequence[PassPart]) -> int:
        """Fill the inputs with the parts' rows, each from a new block on, and with padding. Returns the number of rows."""
        numbers = np.zeros(len(self._numbers), np.int64)
        positions, rows, last = np.split(numbers, self._ends)
        positions[:] = self.num_places
        at = num_rows = 0
        for part in parts:
            fed, first, more = part.num_queries, part.rows.first_row, part.rows.num_rows
            width = -(-fed // BLOCK_TOKENS) * BLOCK_TOKENS
            end = at + more * width
            self.ids[0, at:end] = F.pad(part.ids, (0, width - fed)).flatten()
            places = positions[at:end].reshape(more, width)
            places[:, :fed] = (part.rows.starts + part.column)[:, None] + np.arange(fed)
            rows[at // BLOCK_TOKENS : end // BLOCK_TOKENS] = np.repeat(
                np.arange(first, first + more), width // BLOCK_TOKENS
            )
            last[num_rows : num_rows + more] = at + np.arange(more) * width + fed - 1
            at, num_rows = end, num_rows + more
        self._numbers.copy_(upload(numbers, self._numbers.device))
        return num_rows


def num_blocks_of(parts: Sequence[PassPart]) -> int:
    """Number of blocks for the parts' rows, rounded up to a captured size if there is one."""
    number = sum(part.rows.num_rows * -(-part.num_queries // BLOCK_TOKENS) for part in parts)
    return next((size for size in SIZES if size >= number), number)


@dataclass(frozen=True, slots=True)
class PassShape:
    """Shape of a captured pass. num_tokens: tokens of each row that attention reads."""

    num_rows: int
    num_queries: int
    num_tokens: int
    num_logits: int


@dataclass(slots=True)
class RecordedPass:
    """A captured pass of decoding rows. ids, positions: [rows, queries], its inputs. used_rows: rows of the last replay."""

    ids: torch.Tensor
    positions: torch.Tensor
    recording: Recording
    used_rows: int


class CapturedModel(CachedModel):
    """Replays passes of up to `max_queries` queries per row, and with our kernels those of prompts; others run plainly.

    max_recordings: captures of decoding passes to keep; the least recently used is evicted. The pool needs `max_queries`
    more positions per row than the context. num_first_uses: passes captured so far. widths: queries and logits per row of
    decoding passes; with our kernels, passes of other widths are cut into blocks.
    """

    def __init__(
        self,
        plain: CachedModel,
        recorder: Recorder,
        max_queries: int,
        max_recordings: int,
        widths: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(plain.model, plain.pool, plain.max_context_length)
        self.recorder: Recorder | None = recorder
        self.max_queries = max_queries
        self.max_recordings = max_recordings
        self.widths = widths
        self._passes: OrderedDict[PassShape, RecordedPass] = OrderedDict()
        self._blocks: dict[int, RecordedBlocks] = {}  # by number of blocks
        self._too_large: set[PassShape | int] = set()  # shapes, and numbers of blocks, that do not fit in memory
        # Shared buffers for logits, by kind. One per capture would take gigabytes, since there are hundreds of shapes.
        self._places: dict[str, torch.Tensor] = {}
        self._all_rows = torch.arange(plain.pool.num_rows, device=plain.device)
        self._spare_position = plain.pool.max_length - max_queries
        if self._spare_position < plain.max_context_length:
            raise ValueError(
                f"the pool holds {plain.pool.max_length} tokens a row, but {plain.max_context_length} and {max_queries} "
                "spare ones are needed"
            )

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """As PassModel. Prompts run in a pass of their own, after that of the decoding rows."""
        first, *others = equal = equal_parts(parts)
        logits = self._replay(first) if self._is_decoding(first) else None
        if logits is None:
            return self._prefill(equal)
        return [logits, *(self._prefill(others) if others else ())]

    def _is_decoding(self, part: PassPart) -> bool:
        """True if a part has a captured shape. Prompts do not, nor does a draft model that lacks many tokens of few rows."""
        if self.recorder is None or part.num_queries > self.max_queries or part.rows.first_row:
            return False
        if not self.has_kernels or part.num_logits > 1 or num_blocks_of([part]) > MOST_BLOCKS:
            return True
        return (part.num_queries, part.num_logits) in self.widths

    def _replay(self, part: PassPart) -> torch.Tensor | None:
        """Logits of rows 0, 1, ... from a captured pass; None if it cannot be captured."""
        rows, end = part.rows, part.column + part.num_queries
        positions = rows.positions[:, part.column : end]
        num_rows = padded_rows(rows.num_rows, self.pool.num_rows)
        shape = PassShape(num_rows, part.num_queries, self._reach(rows.num_tokens), part.num_logits)
        recorded = self._passes.get(shape) or self._record(shape, part.ids, positions)
        if recorded is None:
            return None
        self._passes.move_to_end(shape)
        self.pool.note_written(0, rows.starts + end)
        self._fill(recorded, part.ids, positions)
        recorded.recording.replay()
        return recorded.recording.logits[: rows.num_rows]

    def _prefill(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits of prompts and similar parts, from captured blocks where possible."""
        num_blocks = num_blocks_of(parts)
        fitting = num_blocks <= MOST_BLOCKS and all(part.num_logits == 1 for part in parts)
        if not (fitting and self.has_kernels and self.recorder is not None):
            return super().forward(parts)
        recorded = self._blocks.get(num_blocks) or self._record_blocks(num_blocks)
        if recorded is None:
            return super().forward(parts)
        for part in parts:
            self.pool.note_written(part.rows.first_row, part.rows.starts + part.column + part.num_queries)
        return recorded.replay(parts)

    def compile_kernels(self) -> None:
        """Compile the kernels of all passes that `record_ahead` captures, so that its time is spent on captures alone."""
        if not self.has_kernels:
            return
        nothing = torch.empty(0, 1, dtype=torch.long, device=self.device)
        try:
            with self.model.kernels.compiled_only():
                for shape in self._shapes():
                    self._inputs_and_run(shape, nothing, nothing)[2]()
                for number in reversed(SIZES):
                    RecordedBlocks(number, self._spare_position, self.device).run(self)
        except (
            Exception
        ) as error:  # any of Triton's compiler; kernels that lack memory are compiled when first launched
            if not is_out_of_memory(error):
                self.leave_out_kernels(first_line(error))

    def record_ahead(self, until: float) -> int:
        """Capture passes of all widths and numbers of rows before they are used. Returns the number of captures.

        until: time.monotonic() from which on no further capture starts.
        """
        had_kernels = self.has_kernels
        nothing = torch.empty(0, 1, dtype=torch.long, device=self.device)
        blocks = reversed(SIZES) if had_kernels else ()
        missing: list[Callable[[], object]] = [
            *(partial(self._record, shape, nothing, nothing) for shape in self._shapes() if shape not in self._passes),
            *(partial(self._record_blocks, number) for number in blocks if number not in self._blocks),
        ]
        for record in missing:
            if self.recorder is None or time.monotonic() >= until:
                break
            record()
            if self.has_kernels != had_kernels:  # our kernels failed, and without them the shapes differ
                return self.record_ahead(until)
        return len(self._passes) + len(self._blocks)

    def _shapes(self) -> list[PassShape]:
        """The shapes to capture: short rows before long ones. For one length, the largest shapes come first.

        The others then share their memory.
        """
        most = self.pool.num_rows
        sizes = {padded_rows(rows, most) for rows in range(1, most + 1)}
        shapes = [
            PassShape(num_rows, num_queries, num_tokens, num_logits)
            for num_tokens in self._reaches()
            for num_queries, num_logits in sorted(self.widths)
            for num_rows in sizes
        ]
        return sorted(
            shapes[: self.max_recordings], key=lambda shape: (shape.num_tokens, -shape.num_queries, -shape.num_rows)
        )

    def _reach(self, num_tokens: int) -> int:
        """Number of tokens of each row that a pass reads, if rows have at most num_tokens."""
        # The spare positions are never read: padding rows may write NaN there.
        return self._spare_position if self.has_kernels else reach(num_tokens, self._spare_position)

    def _reaches(self) -> list[int]:
        """All values of `_reach`, ascending."""
        found = [self._reach(1)]
        while found[-1] < self._spare_position:
            found.append(self._reach(found[-1] + 1))
        return found

    @property
    def has_kernels(self) -> bool:
        """True if captured passes use our own kernels."""
        return getattr(self.model, "kernels", None) is not None

    def leave_out_kernels(self, reason: str) -> None:
        """Capture passes without our kernels from now on, after a warning."""
        self.model.leave_out_kernels(reason)
        self._passes.clear()
        self._blocks.clear()

    def _fill(self, recorded: RecordedPass, ids: torch.Tensor, positions: torch.Tensor) -> None:
        rows = len(ids)
        recorded.ids[:rows] = ids
        recorded.positions[:rows] = positions
        if rows < recorded.used_rows:
            recorded.positions[rows : recorded.used_rows] = self._spare_positions(recorded.ids.shape[1])
        recorded.used_rows = rows

    def _put(self, logits: torch.Tensor, kind: str, most: int) -> torch.Tensor:
        """Copy logits [..., vocab] into the buffer of their kind, which is allocated before the first capture.

        most: largest number of tokens with logits in passes of this kind.
        """
        if kind not in self._places:
            self._places[kind] = logits.new_empty(most * logits.shape[-1])
        place = self._places[kind][: logits.numel()].view(logits.shape)
        return place.copy_(logits)

    def _spare_positions(self, queries: int) -> torch.Tensor:
        return torch.arange(self._spare_position, self._spare_position + queries, device=self.pool.device)

    def _record(self, shape: PassShape, ids: torch.Tensor, positions: torch.Tensor) -> RecordedPass | None:
        """Capture a decoding pass; None if that is impossible, now or permanently."""
        if shape in self._too_large:
            return None
        if len(self._passes) >= self.max_recordings:
            self._passes.popitem(last=False)
        fixed_ids, fixed_positions, run = self._inputs_and_run(shape, ids, positions)
        recording = self._try_to_record(run, shape, str(shape))
        if recording is None:
            return None
        recorded = self._passes[shape] = RecordedPass(fixed_ids, fixed_positions, recording, len(ids))
        return recorded

    def _inputs_and_run(
        self, shape: PassShape, ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]:
        """The fixed ids and positions of a pass, filled with those given, and the pass itself."""
        fixed_ids = ids.new_zeros(shape.num_rows, shape.num_queries)
        fixed_positions = positions.new_empty(shape.num_rows, shape.num_queries)
        fixed_positions[:] = self._spare_positions(shape.num_queries)
        # The capture writes the same values as the first replay.
        fixed_ids[: len(ids)], fixed_positions[: len(ids)] = ids, positions
        kind, most = ("several", self.max_queries) if shape.num_logits > 1 else ("one", 1)

        def run() -> torch.Tensor:
            masks = StepMasks(fixed_positions, shape.num_tokens, self.pool.dtype)
            attention = RecordedRows(self.pool, masks, self._all_rows[: shape.num_rows], self._spare_position)
            logits = self.run(fixed_ids, fixed_positions, attention, shape.num_logits)
            return self._put(logits, kind, self.pool.num_rows * most)

        return fixed_ids, fixed_positions, run

    def _record_blocks(self, num_blocks: int) -> RecordedBlocks | None:
        """Capture a pass of num_blocks blocks; None if that is impossible, now or permanently."""
        if num_blocks in self._too_large:
            return None
        blocks = RecordedBlocks(num_blocks, self._spare_position, self.device)
        what = f"{num_blocks} blocks of prompts"
        recording = self._try_to_record(lambda: self._put(blocks.run(self), "blocks", MOST_BLOCKS), num_blocks, what)
        if recording is None:
            return None
        blocks.recording = recording
        self._blocks[num_blocks] = blocks
        return blocks

    def _try_to_record(self, run: Callable[[], torch.Tensor], shape: PassShape | int, what: str) -> Recording | None:
        """A capture; None, after a warning, if there is no memory, our kernels fail, or the device cannot capture."""
        assert self.recorder is not None
        try:
            recording = self.recorder.record(run)
        except Exception as error:  # no graphs, no memory, or any error of Triton's compiler
            if is_out_of_memory(error):
                self._too_large.add(shape)
                number = len(self._passes) + len(self._blocks)
                log.warning("no memory to capture %s: it runs one kernel at a time; %d graphs are kept", what, number)
            elif self.has_kernels:
                self.leave_out_kernels(first_line(error))
            else:
                log.warning("CUDA graphs cannot be captured, so passes run one kernel at a time: %s", first_line(error))
                self.recorder = None
                self._passes.clear()
            return None
        self.num_first_uses += 1
        return recording


def padded_rows(rows: int, most: int) -> int:
    """Rows rounded up to a power of two, beyond 8 to a multiple of 8."""
    padded = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    return min(padded, most)


def reach(num_tokens: int, most: int) -> int:
    """Number of tokens that attention reads: num_tokens rounded up to 128, 256, 512, ..., at most `most`."""
    return min(max(SMALLEST_REACH, 1 << (num_tokens - 1).bit_length()), most)
