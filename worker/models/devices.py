"""Names of devices, as people say them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device) -> str:
    """Kind of device as people say it, for example "cuda:NVIDIA H200" or "cpu:AMD EPYC x2"."""
    if device.type == "cuda":
        import torch  # only here: vLLM's processes ask for the processor's name alone

        return f"cuda:{torch.cuda.get_device_name(device)}"
    return f"cpu:{processor_name()} x{os.cpu_count()}"


def processor_name() -> str:
    """Name of the processor as the kernel gives it; the architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
