"""Prompts cut into blocks of a few tokens, so that prompts of all lengths make passes of few shapes.

A block is a row of a recorded pass, with the index of a row of the pool as an input. The shape is the number of blocks,
rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from speclen.worker.backends.passes import PassPart
from speclen.worker.backends.torch.cached_model import CachedModel
from speclen.worker.backends.torch.recording import Recording
from speclen.worker.backends.torch.row_attention import RecordedRows, StepMasks
from speclen.worker.models.upload import upload

BLOCK_TOKENS = 16
# Numbers of blocks of recorded passes: up to 256 tokens, in prompts that may end inside a block.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
MOST_BLOCKS = SIZES[-1]


@dataclass(frozen=True, slots=True)
class Blocks:
    """ids: [blocks * BLOCK_TOKENS], on the device. positions: [blocks, BLOCK_TOKENS]; `num_places` for padding.

    rows: [blocks], of the pool. last: index in `ids` of the last token of every row of the parts.
    """

    ids: torch.Tensor
    positions: np.ndarray
    rows: np.ndarray
    last: np.ndarray


def cut(parts: Sequence[PassPart], num_places: int) -> Blocks:
    """The parts' rows, each starting a block. num_places: of a row of the pool, without spare places."""
    ids, positions, rows, last = [], [], [], []
    num_tokens = 0
    for part in parts:
        fed = part.num_queries
        width = -(-fed // BLOCK_TOKENS) * BLOCK_TOKENS
        ids.append(F.pad(part.ids, (0, width - fed)).flatten())
        places = (part.rows.starts + part.column)[:, None] + np.arange(width)
        places[:, fed:] = num_places
        positions.append(places.reshape(-1, BLOCK_TOKENS))
        numbers = part.rows.first_row + np.arange(part.rows.num_rows)
        rows.append(np.repeat(numbers, width // BLOCK_TOKENS))
        last.append(num_tokens + np.arange(part.rows.num_rows) * width + fed - 1)
        num_tokens += part.rows.num_rows * width
    return Blocks(torch.cat(ids), np.concatenate(positions), np.concatenate(rows), np.concatenate(last))


class BlocksInputs:
    """Inputs of a recorded pass of `num_blocks` blocks; as in Blocks."""

    def __init__(self, num_blocks: int, num_places: int, device: torch.device) -> None:
        self.num_places = num_places
        self.ids = torch.zeros(1, num_blocks * BLOCK_TOKENS, dtype=torch.long, device=device)
        # One tensor, for a single upload.
        self._ends = num_blocks * BLOCK_TOKENS, num_blocks * (BLOCK_TOKENS + 1)
        self._numbers = torch.zeros(num_blocks * (BLOCK_TOKENS + 2), dtype=torch.long, device=device)
        positions, self.rows, self.last = self._numbers.tensor_split(self._ends)
        self.positions = positions.fill_(num_places).view(num_blocks, BLOCK_TOKENS)

    def fill(self, blocks: Blocks) -> None:
        """Fill the inputs; further blocks are empty."""
        self.ids[0, : len(blocks.ids)] = blocks.ids
        numbers = np.zeros(len(self._numbers), np.int64)
        positions, rows, last = np.split(numbers, self._ends)
        positions[:] = self.num_places
        positions[: blocks.positions.size] = blocks.positions.ravel()
        rows[: len(blocks.rows)] = blocks.rows
        last[: len(blocks.last)] = blocks.last
        self._numbers.copy_(upload(numbers, self._numbers.device))

    def run(self, model: CachedModel) -> torch.Tensor:
        """Logits [blocks, vocab] after the tokens at `last`."""
        masks = StepMasks(self.positions, self.num_places, model.pool.dtype)
        attention = RecordedRows(model.pool, masks, self.rows, self.num_places)
        return model.run(self.ids, self.positions.view(1, -1), attention, self.last)[0]


@dataclass(slots=True)
class RecordedBlocks:
    """A recorded pass and its inputs."""

    inputs: BlocksInputs
    recording: Recording

    def replay(self, blocks: Blocks, parts: Sequence[PassPart]) -> list[torch.Tensor]:
        """Logits [rows, 1, vocab] of each part, valid until the next replay."""
        self.inputs.fill(blocks)
        self.recording.replay()
        logits = self.recording.logits[: len(blocks.last), None]
        return [*logits.split([part.rows.num_rows for part in parts])]


def num_blocks_of(parts: Sequence[PassPart]) -> int:
    """Blocks of the parts' rows, rounded up to a recorded size, if there is one."""
    number = sum(part.rows.num_rows * -(-part.num_queries // BLOCK_TOKENS) for part in parts)
    return next((size for size in SIZES if size >= number), number)


def sizes_up_to(most: int) -> list[int]:
    """Numbers of blocks that are recorded, up to `most`."""
    return [size for size in SIZES if size <= most]
