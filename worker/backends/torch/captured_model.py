"""Passes recorded once per shape and replayed: on a GPU, CUDA graphs.

Launching the few hundred kernels of a small model's pass one by one takes several times as long as running them. A
recorded pass is one launch. Its memory is fixed: the pool, the inputs, which are copied in before, and the logits, which
all recordings of a model share: they stay valid until the model's next pass.

A shape is the number of rows, of queries per row, and of tokens that attention reads; the last is constant with kernels of
our own, which read each row's length. Rows and tokens are rounded up, so that some dozens of recordings suffice, and most
are captured before serving. Padding rows write beyond the longest context. With kernels, prompts are cut into blocks, whose
number makes a shape; without, they take the plain path.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from speclen.worker.backends.check import first_line
from speclen.worker.backends.passes import PassPart, RaggedPart, equal_parts
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.prompt_blocks import MOST_BLOCKS, SIZES, RecordedBlocks, num_blocks_of
from speclen.worker.backends.torch.recording import Recorder, Recording, is_out_of_memory
from speclen.worker.backends.torch.row_attention import RecordedRows, StepMasks

log = logging.getLogger(__name__)

SMALLEST_REACH = 128  # tokens that attention reads at least


@dataclass(frozen=True, slots=True)
class PassShape:
    """num_tokens: that attention reads."""

    num_rows: int
    num_queries: int
    num_tokens: int
    num_logits: int


@dataclass(slots=True)
class RecordedPass:
    """ids, positions: [rows, queries], the inputs. used_rows: rows without padding at the last replay."""

    ids: torch.Tensor
    positions: torch.Tensor
    recording: Recording
    used_rows: int


class CapturedModel(CachedModel):
    """Replays passes of up to `max_queries` queries a row, and with kernels those of prompts; others take the plain path.

    max_recordings: of passes of decoding rows, kept at most; the least recently used is evicted. The pool must have
    `max_queries` places more per row than the context. num_first_uses: passes recorded so far. widths: queries and logits
    per row of decoding passes; with kernels others are cut into blocks.
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
        self._blocks: dict[int, RecordedBlocks] = {}  # by their number
        self._too_large: set[PassShape | int] = set()  # shapes and numbers of blocks, for the memory
        # Shared buffers for logits, by kind. One per recording would take gigabytes: there are hundreds of shapes.
        self._places: dict[str, torch.Tensor] = {}
        self._all_rows = torch.arange(plain.pool.num_rows, device=plain.device)
        self._spare_position = plain.pool.max_length - max_queries
        if self._spare_position < plain.max_context_length:
            raise ValueError(
                f"the pool holds {plain.pool.max_length} tokens a row, but {plain.max_context_length} and {max_queries} "
                "spare ones are needed"
            )

    def forward(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        """As PassModel, with prompts in a pass of their own, after the decoding rows'."""
        first, *others = equal = equal_parts(parts)
        logits = self._replay(first) if self._is_decoding(first) else None
        if logits is None:
            return self._feed(equal)
        return [logits, *(self._feed(others) if others else ())]

    def _is_decoding(self, part: PassPart) -> bool:
        """True if a part has a recorded shape. Prompts do not, nor does a draft that lacks many tokens of few rows."""
        if self.recorder is None or part.num_queries > self.max_queries or part.rows.first_row:
            return False
        if not self.has_kernels or part.num_logits > 1 or num_blocks_of([part]) > MOST_BLOCKS:
            return True
        return (part.num_queries, part.num_logits) in self.widths

    def _replay(self, part: PassPart) -> torch.Tensor | None:
        """Logits of rows 0, 1, ... by a recorded pass; None if it cannot be recorded."""
        rows, end = part.rows, part.column + part.num_queries
        positions = rows.positions[:, part.column : end]
        num_rows = padded_rows(rows.num_rows, self.pool.num_rows)
        shape = PassShape(num_rows, part.num_queries, self._reach(rows.num_tokens), part.num_logits)
        recorded = self._passes.get(shape) or self._record(shape, part.ids, positions)
        if recorded is None:
            return None
        self._passes.move_to_end(shape)
        self.pool.note_rows_written(0, rows.starts + end)
        self._fill(recorded, part.ids, positions)
        recorded.recording.replay()
        return recorded.recording.logits[: rows.num_rows]

    def _feed(self, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits of prompts and similar parts, in recorded blocks where possible."""
        num_blocks = num_blocks_of(parts)
        fitting = num_blocks <= MOST_BLOCKS and all(part.num_logits == 1 for part in parts)
        if not (fitting and self.has_kernels and self.recorder is not None):
            return super().forward(parts)
        recorded = self._blocks.get(num_blocks) or self._record_blocks(num_blocks)
        if recorded is None:
            return super().forward(parts)
        for part in parts:
            self.pool.note_rows_written(part.rows.first_row, part.rows.starts + part.column + part.num_queries)
        return recorded.replay(parts)

    def compile_kernels(self) -> None:
        """Compile the kernels of all passes that `record_ahead` records, so that its time goes to recording alone."""
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
        """Record passes of all widths and numbers of rows ahead of their use; returns the number of recordings.

        until: by time.monotonic(), when no further one starts.
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
            if self.has_kernels != had_kernels:  # they do not run, and without them shapes differ
                return self.record_ahead(until)
        return len(self._passes) + len(self._blocks)

    def _shapes(self) -> list[PassShape]:
        """The shapes to record: short rows before long ones, narrow before wide.

        Among rows of one length the largest come first, whose memory the others share.
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
        """Tokens of each row that a pass reads, for rows of at most num_tokens."""
        # Values written by padding rows may not be finite, and are never read.
        return self._spare_position if self.has_kernels else reach(num_tokens, self._spare_position)

    def _reaches(self) -> list[int]:
        """All values of `_reach`, ascending."""
        found = [self._reach(1)]
        while found[-1] < self._spare_position:
            found.append(self._reach(found[-1] + 1))
        return found

    @property
    def has_kernels(self) -> bool:
        """True if recorded passes use kernels of our own."""
        return getattr(self.model, "kernels", None) is not None

    def leave_out_kernels(self, reason: str) -> None:
        """Record passes without them from now on, after a warning."""
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
        """The logits, copied into the buffer of their kind, which is made before the first recording.

        logits: [..., vocab]. most: largest number of tokens with logits in passes of this kind.
        """
        if kind not in self._places:
            self._places[kind] = logits.new_empty(most * logits.shape[-1])
        place = self._places[kind][: logits.numel()].view(logits.shape)
        return place.copy_(logits)

    def _spare_positions(self, queries: int) -> torch.Tensor:
        return torch.arange(self._spare_position, self._spare_position + queries, device=self.pool.device)

    def _record(self, shape: PassShape, ids: torch.Tensor, positions: torch.Tensor) -> RecordedPass | None:
        """Record a pass; None if that is impossible now or for good."""
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
        """Fixed ids and positions of a pass, which begin with those given, and the pass itself."""
        fixed_ids = ids.new_zeros(shape.num_rows, shape.num_queries)
        fixed_positions = positions.new_empty(shape.num_rows, shape.num_queries)
        fixed_positions[:] = self._spare_positions(shape.num_queries)
        # Recording writes the same values as the first replay.
        fixed_ids[: len(ids)], fixed_positions[: len(ids)] = ids, positions
        kind, most = ("several", self.max_queries) if shape.num_logits > 1 else ("one", 1)

        def run() -> torch.Tensor:
            masks = StepMasks(fixed_positions, shape.num_tokens, self.pool.dtype)
            attention = RecordedRows(self.pool, masks, self._all_rows[: shape.num_rows], self._spare_position)
            logits = self.run(fixed_ids, fixed_positions, attention, shape.num_logits)
            return self._put(logits, kind, self.pool.num_rows * most)

        return fixed_ids, fixed_positions, run

    def _record_blocks(self, num_blocks: int) -> RecordedBlocks | None:
        """Record a pass of so many empty blocks; None if that is impossible now or for good."""
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
        """A recording; None, after a warning, without memory, working kernels, or a device that records."""
        assert self.recorder is not None
        try:
            recording = self.recorder.record(run)
        except Exception as error:  # no graphs, no memory, or any error of Triton's compiler
            if is_out_of_memory(error):
                self._too_large.add(shape)
                number = len(self._passes) + len(self._blocks)
                log.warning("no memory to capture %s; it runs one kernel at a time, %d graphs are kept", what, number)
            elif self.has_kernels:
                self.leave_out_kernels(first_line(error))
            else:
                log.warning("no CUDA graphs here, passes run one kernel at a time: %s", first_line(error))
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
    """Tokens that attention reads, rounded up: 128, 256, 512, ..."""
    return min(max(SMALLEST_REACH, 1 << (num_tokens - 1).bit_length()), most)
