"""Capture and replay of a pass: on a GPU, by a CUDA graph.

`Recorder` is the interface, so that all other code for recorded passes runs, and is tested, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded pass. replay: runs it again on the present inputs. logits: where its result lies then."""

    replay: Callable[[], object]
    logits: torch.Tensor


class Recorder(Protocol):
    """Records passes."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        """Record what `run` does, which always puts its result in the same place.

        The result need not be right before the first replay.
        """


class RerunRecorder:
    """For devices without graphs: a pass runs again, into the same place, with none of the speed."""

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        return Recording(run, run())


class GraphRecorder:
    """Records CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Recording:
        with torch.cuda.device(self._device):
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
        return Recording(graph.replay, logits)


def is_out_of_memory(error: Exception) -> bool:
    """True for torch's error, or the driver's message."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
