"""Limits of this process's control groups (version 2), as set for a container, a pod or a service."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")


def lines_of(path: str | Path) -> list[str]:
    """Lines of a file of the kernel; none if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except OSError:
        return []


def free_bytes() -> list[int]:
    """Memory left in each group with a limit."""
    return [free for folder in _folders() if (free := _free_of(folder)) is not None]


def cores() -> float:
    """Cores of the tightest of the groups' quotas; infinite without one."""
    return min((cores for folder in _folders() if (cores := _cores_of(folder)) is not None), default=float("inf"))


def _folders() -> list[Path]:
    """Folders of the process's group and of all above it."""
    path = next((line.strip()[3:] for line in lines_of("/proc/self/cgroup") if line.startswith("0::")), None)
    if path is None:
        return []
    names = PurePosixPath(path).parts[1:]
    return [GROUPS.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def _free_of(folder: Path) -> int | None:
    """The limit minus used memory, without file caches, which can be evicted; None without a limit."""
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
