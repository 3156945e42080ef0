"""Clock of a model's forward passes inside the engine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from speclen.worker.backends.passes import HostModel, PassModel

Arguments = ParamSpec("Arguments")
Logits = TypeVar("Logits")


class ForwardClock:
    """Total wall time and number of a model's passes from now on.

    Only meaningful where passes are synchronous, as on a CPU. model None: nothing to time.
    """

    def __init__(self, model: PassModel | None) -> None:
        self.seconds = 0.0
        self.num_forwards = 0
        if isinstance(model, HostModel):
            model.host_logits = self._timed(model.host_logits)  # type: ignore[method-assign]
        if model is not None:
            model.forward = self._timed(model.forward)  # type: ignore[method-assign]

    def _timed(self, run: Callable[Arguments, Logits]) -> Callable[Arguments, Logits]:
        @functools.wraps(run)
        def timed(*args: Arguments.args, **options: Arguments.kwargs) -> Logits:
            started = time.perf_counter()
            logits = run(*args, **options)
            self.seconds += time.perf_counter() - started
            self.num_forwards += 1
            return logits

        return timed
