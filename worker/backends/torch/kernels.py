"""Choice of kernels of our own for Llama-style layers: `fused` on a GPU where Triton runs, else none."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, TypeAlias

import torch

from speclen.worker.backends.check import first_line

log = logging.getLogger(__name__)


# The module `fused`, whose import fails without Triton.
Kernels: TypeAlias = Any


@cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """`fused`, on a GPU where it runs in this dtype; None elsewhere."""
    if device.type != "cuda":
        return None
    try:
        from speclen.worker.backends.torch import fused

        if fused.works_on(device, dtype):
            return fused
        reason = "they compute something else"
    except Exception as error:  # no Triton, no compiler, or an unknown GPU
        reason = first_line(error)
    warn_left_out(reason)
    return None


def warn_left_out(reason: str) -> None:
    log.warning("Triton's kernels are left out, so that passes take longer: %s", reason)
