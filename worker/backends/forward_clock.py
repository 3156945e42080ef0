"""Times a model's forwards inside the engine."""

from __future__ import annotations

import time
from typing import Any


class ForwardClock:
    """Adds up wall time and number of a model's forwards through hooks.

    Only meaningful where forwards are synchronous, that is, on CPU. model None: nothing to time.
    """

    def __init__(self, model: Any | None) -> None:
        self.seconds = 0.0
        self.num_forwards = 0
        self._started = 0.0
        if model is not None:
            model.register_forward_pre_hook(self._start)
            model.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._started
        self.num_forwards += 1
