"""Names of devices."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device) -> str:
    """Kind of device, for example "cuda:NVIDIA H200" or "cpu:AMD EPYC x2"."""
    if device.type == "cuda":
        import torch  # only here: vLLM's processes only need the processor's name

        return f"cuda:{torch.cuda.get_device_name(device)}"
    return f"cpu:{processor_name()} x{os.cpu_count()}"


def processor_name() -> str:
    """Name of the processor; without one, its architecture."""
    facts = _processor_facts()
    if not facts:
        return platform.processor() or platform.machine()
    return facts.get("model name", platform.machine())


def processor_model() -> str:
    """For example "family 26 model 2", "" if unknown.

    Virtual machines give several generations of processors one name, and one of them is twice as fast as another.
    """
    facts = _processor_facts()
    if "cpu family" not in facts or "model" not in facts:
        return ""
    return f"family {facts['cpu family']} model {facts['model']}"


def _processor_facts() -> dict[str, str]:
    """Entries of /proc/cpuinfo for the first processor; empty without the file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    # Reversed, so that the first processor's entries win.
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
