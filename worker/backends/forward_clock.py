"""Times a model's forwards inside the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from speclen.worker.backends.passes import PassModel, PassPart, RaggedPart


class ForwardClock:
    """Adds up wall time and number of a model's passes, from now on.

    Only meaningful where they are synchronous, that is, on CPU. model None: nothing to time.
    """

    def __init__(self, model: PassModel | None) -> None:
        self.seconds = 0.0
        self.num_forwards = 0
        if model is not None:
            self._forward = model.forward
            model.forward = self._timed  # type: ignore[method-assign]

    def _timed(self, parts: Sequence[PassPart | RaggedPart]) -> list[torch.Tensor]:
        started = time.perf_counter()
        logits = self._forward(parts)
        self.seconds += time.perf_counter() - started
        self.num_forwards += 1
        return logits
