"""What a benchmark ran on, so that its figures can be read later."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import torch

from speclen.worker.models.devices import device_name, processor_model, processor_name


def machine(device: torch.device) -> dict[str, Any]:
    """Names and versions that figures depend on. load_average: processes that wanted a core in the last minute."""
    return {
        "device": device_name(device),
        "processor": processor_name(),
        "processor_model": processor_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT", ""),
        "load_average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
