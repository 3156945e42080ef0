"""What a benchmark ran on, so that its figures can be read later."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from speclen.worker.models.devices import device_name, processor_name


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


def processor_model() -> str:
    """For example "family 26 model 2", "" where the kernel tells none: virtual machines give several generations of
    processors one name, and one of them is twice as fast as another.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "cpu family" not in facts or "model" not in facts:
        return ""
    return f"family {facts['cpu family']} model {facts['model']}"
