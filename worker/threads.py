"""How many CPU threads a worker's models use. A part of the context: step times depend on it."""

from __future__ import annotations

import os

import torch

from worker.models import ModelPair

# A small model has too little work per operator to share it: one thread per this many parameters is where a further
# thread stops paying, as a rule of thumb.
PARAMETERS_PER_THREAD = 8_000_000


def default_threads(num_cpus: int, num_parameters: int) -> int:
    """CPU threads for a model: one for a small one, at most all cores but one.

    The controller, gRPC and clients need a core too: with as many threads as cores, every step waits for whichever
    thread lost its core.
    """
    return max(1, min(num_cpus - 1, num_parameters // PARAMETERS_PER_THREAD))


def set_threads(threads: int, pair: ModelPair) -> None:
    """Use that many threads from now on; 0: the default for the pair's target."""
    num_parameters = sum(parameter.numel() for parameter in pair.target.parameters())
    torch.set_num_threads(threads or default_threads(os.cpu_count() or 1, num_parameters))
