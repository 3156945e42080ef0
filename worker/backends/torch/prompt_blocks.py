"""Prompts cut into blocks of a few tokens, so that prompts of all lengths make passes of few shapes.

A block is a row of a recorded pass, with the index of a row of the pool as an input. The shape is the number of blocks,
rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class RecordedBlocks:
    """A recorded pass of `num_blocks` blocks, and its inputs. num_places: of a row of the pool, without spare places.

    ids: [1, blocks * BLOCK_TOKENS], and positions: [blocks, BLOCK_TOKENS]; `num_places` for padding. rows: [blocks], of the
    pool. last: [blocks], index in `ids` of the last token of every row of the parts. recording: set by the model.
    """

    recording: Recording

    def __init__(self, num_blocks: int, num_places: int, device: torch.device) -> None:
        self.num_places = num_places
        self.ids = torch.zeros(1, num_blocks * BLOCK_TOKENS, dtype=torch.long, device=device)
        # One tensor, for a single upload.
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
        """Fill the inputs with the parts' rows, each starting a block, and with empty blocks. Returns the rows' number."""
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
    """Blocks of the parts' rows, rounded up to a recorded size, if there is one."""
    number = sum(part.rows.num_rows * -(-part.num_queries // BLOCK_TOKENS) for part in parts)
    return next((size for size in SIZES if size >= number), number)
