"""Waiting for what another thread, task or process does, and the memory of this process."""

import asyncio
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")

# Seconds to wait for what has to happen: it bounds a hang and does not measure the machine, which may be shared.
PATIENCE_S = 120.0


def until(condition: Callable[[], Value], timeout_s: float = PATIENCE_S, what: str = "this") -> Value:
    """The condition's value once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.005)
    return value


async def on_loop_until(condition: Callable[[], Value], timeout_s: float = PATIENCE_S) -> Value:
    """The same as `until`, without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)
    return value


def resident_bytes() -> int:
    """Memory of this process, from the kernel: Linux alone."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * mmap.PAGESIZE


def is_alive(pid: int) -> bool:
    """True if a process runs: Linux alone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
