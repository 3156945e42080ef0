"""The machine that a process runs on: its processor, and the limits of its control groups (version 2).

Control groups hold the limits of a container, a pod or a service. This module does not import torch.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


GROUPS = Path("/sys/fs/cgroup")


def lines_of(path: str | Path) -> list[str]:
    """Lines of a kernel file; [] if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except OSError:
        return []


def free_bytes() -> list[int]:
    """Memory left in each control group that has a limit, in bytes."""
    return [free for folder in _folders() if (free := _free_of(folder)) is not None]


def cores() -> float:
    """Cores by the tightest CPU quota of the control groups; infinite without one."""
    return min((cores for folder in _folders() if (cores := _cores_of(folder)) is not None), default=float("inf"))


def _folders() -> list[Path]:
    """Folders of the process's control group and of all groups above it."""
    path = next((line.strip()[3:] for line in lines_of("/proc/self/cgroup") if line.startswith("0::")), None)
    if path is None:
        return []
    names = PurePosixPath(path).parts[1:]
    return [GROUPS.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def _free_of(folder: Path) -> int | None:
    """The memory limit minus used memory, not counting file caches, which can be evicted; None without a limit."""
    try:
        most, used = int(lines_of(folder / "memory.max")[0]), int(lines_of(folder / "memory.current")[0])
    except (IndexError, ValueError):  # no such file, or "max"
        return None
    caches = [int(line.split()[1]) for line in lines_of(folder / "memory.stat") if line.startswith("inactive_file ")]
    return max(0, most - used + sum(caches))


def _cores_of(folder: Path) -> float | None:
    """Quota over period, as in "400000 100000"; None for "max 100000" and without the file."""
    try:
        quota, period = map(int, lines_of(folder / "cpu.max")[0].split())
        return quota / period
    except (IndexError, ValueError, ZeroDivisionError):
        return None


def device_name(device: torch.device) -> str:
    """Name of a device, for example "cuda:NVIDIA H200" or "cpu:AMD EPYC x2"."""
    if device.type == "cuda":
        import torch  # only here: vLLM's processes only need the processor's name

        return f"cuda:{torch.cuda.get_device_name(device)}"
    return f"cpu:{processor_name()} x{os.cpu_count()}"


def processor_name() -> str:
    """Model name of the processor, or its architecture if the system does not say."""
    facts = _processor_facts()
    if not facts:
        return platform.processor() or platform.machine()
    return facts.get("model name", platform.machine())


def processor_model() -> str:
    """Family and model of the processor, for example "family 26 model 2"; "" if unknown.

    Virtual machines use one name for several generations of processors, of which one may be twice as fast as another.
    """
    facts = _processor_facts()
    if "cpu family" not in facts or "model" not in facts:
        return ""
    return f"family {facts['cpu family']} model {facts['model']}"


def _processor_facts() -> dict[str, str]:
    """Entries of /proc/cpuinfo for the first processor; {} without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    # Reversed, so that the first processor's entries win.
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
