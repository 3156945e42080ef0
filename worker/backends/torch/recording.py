"""Capture and replay of a pass: on a GPU, by a CUDA graph.

`Recorder` is the interface, so that all other code for recorded passes runs, and is tested, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """A recorded pass. logits: where its result lies after `replay`."""

    logits: torch.Tensor

    def replay(self) -> None:
        """Run the pass again on the present inputs."""


class Recorder(Protocol):
    """Records passes."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Record what `run` does, which always puts its result in the same place.

        The result need not be right before the first replay.
        """


@dataclass(slots=True)
class Rerun:
    """A recording that just runs the pass again, into the same place."""

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
        # In their first runs libraries choose kernels and allocate workspaces, which no graph may contain.
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


def is_out_of_memory(error: Exception) -> bool:
    """True for torch's error, or the driver's message."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
