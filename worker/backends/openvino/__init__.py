"""Passes on OpenVINO, for x86 CPUs: any transformers model that passes the check, with the `openvino` package alone.

    convert.py     the traced model, converted to OpenVINO
    blocks.py      keys and values in blocks: a row is a list of blocks; prefix cache: blocks by their tokens
    model.py       the compiled model and its passes

Only this folder imports `openvino`, and this module only when it loads a model.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from speclen.worker.backends.openvino.blocks import BlockPool
from speclen.worker.backends.passes import PassModel
from speclen.worker.models.devices import cpu_has_bfloat16

# The attention operator is not public, so its inputs may differ in another version.
TESTED_VERSION = "2026.4."
# The bfloat16 kernels for AMX crash with SIGFPE on some virtual machines. Set the environment variable to allow them.
MOST_ISA = "AVX512_CORE_FP16"

# openvino_telemetry would send statistics at every import, from a fork of a process with threads. None: not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


def installed_version() -> str | None:
    """Version of the openvino package; None if it is not installed."""
    try:
        return version("openvino") if importlib.util.find_spec("openvino") else None
    except PackageNotFoundError:
        return None


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why this machine cannot run models on OpenVINO, as a clause; None if it may be able to."""
    found = installed_version()
    if device.type != "cpu":
        return f"it runs on CPUs, and the models are on {device}"
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return f"it was tested on Linux and x86, this is {sys.platform} on {platform.machine()}"
    if found is None:
        return "it is not installed: pip install 'speclen[openvino]'"
    if not found.startswith(TESTED_VERSION):
        return f"version {found} is installed and {TESTED_VERSION}x was tested: pip install 'speclen[openvino]'"
    if dtype == torch.bfloat16 and not cpu_has_bfloat16():
        return "this CPU has no bfloat16 products: --dtype float32"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    return None


def load(model: Any, pool: BlockPool, max_context_length: int) -> PassModel:
    """The model on OpenVINO, with the rows of a pool. It shares the given model's weights.

    Raises errors of any type, from the conversion or the compilation.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", MOST_ISA)
    # Not at the top: importing takes a third of a second, and most machines have no openvino.
    from speclen.worker.backends.openvino.convert import convert
    from speclen.worker.backends.openvino.model import OpenVinoModel

    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return OpenVinoModel(*convert(model, pool.shapes), num_bytes, pool, max_context_length)
