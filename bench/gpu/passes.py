"""Time single passes beside what the device's memory bandwidth allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from speclen.worker.backends.passes import PassPart, StepRows, prompt_part
from speclen.worker.backends.torch.cached_model import CachedModel


@dataclass(frozen=True, slots=True)
class PassTime:
    """floor_s: bytes that the pass has to read, over the measured bandwidth."""

    model: str
    batch_size: int
    num_queries: int
    seconds: float
    plain_seconds: float
    floor_s: float

    @property
    def efficiency(self) -> float:
        """Share of the bandwidth that the pass uses."""
        return self.floor_s / self.seconds


class Timer:
    """Seconds of work on a device: by its own events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def median(self, work: Callable[[], object], repeats: int) -> float:
        """Median over repeats, after a few that do not count."""
        for _ in range(3):
            work()
        if self.device.type != "cuda":
            return statistics.median(self._by_clock(work) for _ in range(repeats))
        pairs = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(1e-3 * start.elapsed_time(end) for start, end in pairs)

    @staticmethod
    def _by_clock(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 20) -> float:
    """Bytes per second of a copy within the device's memory, read and written ones together."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / Timer(device).median(lambda: target.copy_(source), repeats)


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that every pass reads: all but the embeddings, of which it reads a few rows."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    # Tied to the input embedding, the output layer reads it all.
    output = model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if id(p) not in looked_up or p is output)


@torch.inference_mode()
def time_pass(
    name: str, model: CachedModel, batch_size: int, num_queries: int, num_tokens: int, bandwidth: float, repeats: int
) -> PassTime:
    """A decoding pass of rows that hold num_tokens each, as the engine runs it, and one kernel at a time."""
    device = model.device
    ids = torch.ones(batch_size, num_queries, dtype=torch.long, device=device)
    starts = np.full(batch_size, num_tokens)

    def part() -> PassPart:
        return PassPart(StepRows(starts, num_queries, device), ids, num_logits=num_queries)

    return _time(name, model, part, model.forward_batch, bandwidth, repeats)


@torch.inference_mode()
def time_prompt(name: str, model: CachedModel, num_tokens: int, bandwidth: float, repeats: int) -> PassTime:
    """A pass of one prompt, likewise."""

    def part() -> PassPart:
        return prompt_part(0, [1] * num_tokens, 0, model.device)

    return _time(name, model, part, lambda one: model.forward_packed([one]), bandwidth, repeats)


def _time(
    name: str,
    model: CachedModel,
    part: Callable[[], PassPart],
    plain: Callable[[PassPart], object],
    bandwidth: float,
    repeats: int,
) -> PassTime:
    """part: makes the pass's only one. plain: runs it one kernel at a time."""
    timer, rows = Timer(model.device), part().rows
    num_tokens = int(rows.starts.sum()) + rows.num_rows * rows.num_columns
    read = weight_bytes(model.model) + num_tokens * model.pool.bytes_per_token
    return PassTime(
        name,
        rows.num_rows,
        rows.num_columns,
        timer.median(lambda: model.forward([part()]), repeats),
        timer.median(lambda: plain(part()), max(3, repeats // 5)),
        read / bandwidth,
    )
