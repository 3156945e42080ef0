"""Measure memory bandwidth, and the least time of a pass over one sequence that follows from it."""

from __future__ import annotations

import time
from typing import Any

import torch

from speclen.worker.models.quantize import int8_of

NUM_BYTES = 256 * 2**20  # far more than caches hold
NUM_READS = 7


def read_bytes_per_s() -> float:
    """The fastest of a few sums over a large array, with torch's threads as they are set."""
    values = torch.ones(NUM_BYTES // 4)
    durations = []
    for _ in range(NUM_READS):
        started = time.perf_counter()
        values.sum()
        durations.append(time.perf_counter() - started)
    return NUM_BYTES / min(durations)


def bytes_per_pass(model: Any) -> int:
    """Of the weights that a pass reads in full: all but a table of embeddings that makes no logits as well."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if embedding is head else embedding.nbytes
    return sum(num_bytes(parameter) for parameter in model.parameters()) - looked_up


def num_bytes(parameter: torch.Tensor) -> int:
    """Bytes that a product with it reads."""
    rounded = int8_of(parameter)
    return parameter.nbytes if rounded is None else rounded.values.nbytes + rounded.scales.nbytes
