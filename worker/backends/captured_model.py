"""Passes of a model recorded once per shape and replayed: on a GPU, CUDA graphs.

Launching the few hundred kernels of a small model's pass one by one takes several times as long as running them. A
recorded pass is one launch. Everything in it has a fixed place: the pool, the inputs, which are copied in before, and the
logits, which all recordings of a model put where the last one did: they stay valid until the model's next pass.

A shape is the number of rows, of queries per row, and of tokens that attention reads. Rows and tokens are rounded up,
so that a few dozen recordings serve everything. Rows that are there only to fill up write beyond the longest context, where
nobody reads. Prompts, whose shapes are without number, take the plain path.

What a recording is made of is behind `Recorder`, so that all of this but the graph itself runs, and is tested, anywhere.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from speclen.worker.backends.attention import RowAttention, StepMasks
from speclen.worker.backends.cached_model import CachedModel
from speclen.worker.backends.check import first_line
from speclen.worker.backends.passes import PassPart, RaggedPart, equal_parts

log = logging.getLogger(__name__)

# Tokens that attention reads at least, and the steps that follow within each doubling.
SMALLEST_REACH = 128
REACHES_PER_DOUBLING = 2


class Recording(Protocol):
    """A recorded pass. logits: where its result lies after `replay`."""

    logits: torch.Tensor

    def replay(self) -> None:
        """Run the pass again, on what its inputs hold now."""


class Recorder(Protocol):
    """Records passes."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Record what `run` does, which always puts its result in the same place.

        That need not be right before the first replay.
        """


@dataclass(slots=True)
class Rerun:
    """A recording that records nothing: it runs the pass again, into the same place."""

    run: Callable[[], torch.Tensor]
    logits: torch.Tensor

    def replay(self) -> None:
        self.run()


class RerunRecorder:
    """For devices without graphs: the same places, none of the speed."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        return Rerun(run, run())


@dataclass(slots=True)
class GraphRecording:
    """A CUDA graph."""

    graph: Any
    logits: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


class GraphRecorder:
    """Records CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        with torch.cuda.device(self._device):
            return self._record(run)

    def _record(self, run: Callable[[], torch.Tensor]) -> Recording:
        # Libraries choose their kernels and take their workspaces in the first runs, which no graph may contain.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls may not be recorded; others may go on using the device.
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            logits = run()
        return GraphRecording(graph, logits)


@dataclass(frozen=True, slots=True)
class PassShape:
    """num_tokens: that attention reads."""

    num_rows: int
    num_queries: int
    num_tokens: int
    num_logits: int


@dataclass(slots=True)
class RecordedPass:
    """ids, positions: [rows, queries], the inputs. used_rows: rows that were filled last time."""

    ids: torch.Tensor
    positions: torch.Tensor
    recording: Recording
    used_rows: int


class CapturedModel(CachedModel):
    """Replays decoding passes of up to `max_queries` queries a row; everything else takes the plain path.

    max_recordings: kept at most, the least recently used goes first. The pool must hold `max_queries` tokens more per
    row than rows ever fill. num_first_uses: passes recorded so far; a step in which it grew says nothing about step times.
    """

    def __init__(self, plain: CachedModel, recorder: Recorder, max_queries: int, max_recordings: int) -> None:
        super().__init__(plain.model, plain.pool, plain.max_context_length)
        self.recorder: Recorder | None = recorder
        self.max_queries = max_queries
        self.max_recordings = max_recordings
        self._passes: OrderedDict[PassShape, RecordedPass] = OrderedDict()
        # Where logits are put: of one position a row, and of several. Else each recording held its own, which for hundreds
        # of shapes and a large vocabulary is gigabytes.
        self._places: dict[bool, torch.Tensor] = {}
        self._spare_position = plain.pool.max_length - max_queries
        if self._spare_position < plain.max_context_length:
            raise ValueError(
                f"the pool holds {plain.pool.max_length} tokens a row, but {plain.max_context_length} and {max_queries} "
                "spare ones are needed"
            )

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """As PassModel, but prompts in a pass of their own, beside the recorded one of the rows that decode."""
        first, *others = equal_parts(parts)
        if self.recorder is None or first.num_queries > self.max_queries or first.rows.first_row:
            return super().forward(parts)
        logits = self._replay(first)
        if logits is None:
            return super().forward(parts)
        return [logits, *(self.forward_packed(others) if others else ())]

    def _replay(self, part: PassPart) -> torch.Tensor | None:
        """Logits of rows 0, 1, ... by a recorded pass; None when it cannot be recorded."""
        rows, end = part.rows, part.column + part.num_queries
        positions = rows.positions[:, part.column : end]
        # What rows that fill up have written may not be finite, and is read by nobody.
        num_tokens = reach(rows.num_tokens, self._spare_position)
        num_rows = padded_rows(rows.num_rows, self.pool.num_rows)
        shape = PassShape(num_rows, part.num_queries, num_tokens, part.num_logits)
        recorded = self._passes.get(shape) or self._record(shape, part.ids, positions)
        if recorded is None:
            return None
        self._passes.move_to_end(shape)
        self.pool.note_rows_written(0, rows.starts + end)
        self._fill(recorded, part.ids, positions)
        recorded.recording.replay()
        return recorded.recording.logits[: rows.num_rows]

    @property
    def has_kernels(self) -> bool:
        """Whether recorded passes go through kernels that others do not."""
        return getattr(self.model, "kernels", None) is not None

    def leave_out_kernels(self, reason: str) -> None:
        """Record passes without them from now on, after a warning."""
        self.model.leave_out_kernels(reason)
        self._passes.clear()

    def _fill(self, recorded: RecordedPass, ids: torch.Tensor, positions: torch.Tensor) -> None:
        rows = len(ids)
        recorded.ids[:rows] = ids
        recorded.positions[:rows] = positions
        if rows < recorded.used_rows:
            recorded.positions[rows : recorded.used_rows] = self._spare_positions(recorded.ids.shape[1])
        recorded.used_rows = rows

    def _put(self, logits: torch.Tensor) -> torch.Tensor:
        """The same in the place for such logits, which is made when a pass first runs: before it is recorded."""
        _, num_logits, vocab_size = logits.shape
        several = num_logits > 1
        if several not in self._places:
            most = self.pool.num_rows * (self.max_queries if several else 1)
            self._places[several] = logits.new_empty(most * vocab_size)
        place = self._places[several][: logits.numel()].view(logits.shape)
        return place.copy_(logits)

    def _spare_positions(self, queries: int) -> torch.Tensor:
        return torch.arange(self._spare_position, self._spare_position + queries, device=self.pool.device)

    def _record(self, shape: PassShape, ids: torch.Tensor, positions: torch.Tensor) -> RecordedPass | None:
        """Record a pass; None when that cannot be done, then or ever."""
        assert self.recorder is not None
        if len(self._passes) >= self.max_recordings:
            self._passes.popitem(last=False)
        fixed_ids = ids.new_zeros(shape.num_rows, shape.num_queries)
        fixed_positions = positions.new_empty(shape.num_rows, shape.num_queries)
        fixed_positions[:] = self._spare_positions(shape.num_queries)
        # What is written while recording is what the first replay writes again.
        fixed_ids[: len(ids)], fixed_positions[: len(ids)] = ids, positions

        def run() -> torch.Tensor:
            masks = StepMasks(fixed_positions, shape.num_tokens, self.pool.dtype)
            attention = RowAttention(self.pool, masks, slice(None), recorded=True)
            return self._put(self.run(fixed_ids, fixed_positions, attention, shape.num_logits))

        try:
            recording = self.recorder.record(run)
        except Exception as error:  # A driver without graphs, no memory, or whatever Triton's compiler raises.
            if is_out_of_memory(error):
                log.warning(
                    "no memory for a recording of %s: it runs unrecorded, %d are kept", shape, len(self._passes)
                )
                self.max_recordings = max(1, len(self._passes))
                return None
            if self.has_kernels:
                self.leave_out_kernels(first_line(error))
                return self._record(shape, ids, positions)
            log.warning("this device cannot record passes, they run one kernel at a time: %s", first_line(error))
            self.recorder = None
            self._passes.clear()
            return None
        self.num_first_uses += 1
        recorded = self._passes[shape] = RecordedPass(fixed_ids, fixed_positions, recording, len(ids))
        return recorded


def is_out_of_memory(error: Exception) -> bool:
    """torch's allocator has an error of its own, the driver tells it in words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def padded_rows(rows: int, most: int) -> int:
    """Rows rounded up to a power of two, beyond 8 to a multiple of 8."""
    padded = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    return min(padded, most)


def reach(num_tokens: int, most: int) -> int:
    """Tokens that attention reads, rounded up: 128, 192, 256, 384, 512, ..."""
    doubled = SMALLEST_REACH
    while doubled < num_tokens:
        for step in range(1, REACHES_PER_DOUBLING + 1):
            between = doubled + step * doubled // REACHES_PER_DOUBLING
            if between >= num_tokens:
                return min(between, most)
        doubled *= 2
    return min(doubled, most)
