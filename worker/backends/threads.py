"""The number of CPU threads for the models: as many as help, and fewer while other processes need the cores.

The threads of a forward pass wait for each other after every operator. They spin meanwhile, since sleeping and waking takes
longer than most operators. If another process is busy on a core, the kernel runs it for milliseconds at a time, and all
other threads spin until the preempted one continues: one thread fewer is then several times as fast. So the worker measures
how long its threads wait for a core, and uses fewer threads while that is long.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from speclen.worker.models import machine
from speclen.worker.models.loading import ModelPair

log = structlog.get_logger()

# Rule of thumb: each further thread needs this many more parameters, since small operators cannot be split.
PARAMETERS_PER_THREAD = 8_000_000

INTERVAL_S = 0.5
# Share of time that a thread waits for a core, above which one is given up. On two cores with a controller and clients it
# was 6 to 10 percent, with another busy process 30 to 45 percent.
CROWDED = 0.2
BUSY = 0.2  # share of time that a thread must run, or wait to run, to be counted
FREE_CORE = 0.7  # idle cores that are needed before one more thread is tried
FIRST_HOLD_S = 2.0  # before a thread that was given up is tried again; doubles with every failure
TRIAL_S = 5.0  # a thread that is given up again within this time has failed
LONGEST_HOLD_S = 60.0


def usable_cores() -> set[int]:
    """Cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def set_threads(threads: int, pair: ModelPair) -> None:
    """Set torch's number of threads, for calls from the calling thread. 0: the default for the target's size."""
    num_parameters = sum(parameter.numel() for parameter in pair.target.parameters())
    # Once a container's quota is used up, all threads stop for the rest of its period, so fewer are faster.
    num_cores = max(1, int(min(len(usable_cores()), machine.cores())))
    torch.set_num_threads(threads or max(1, min(num_cores, num_parameters // PARAMETERS_PER_THREAD)))


class ThreadChoice:
    """The number of threads, updated once per interval. most: used while no other process needs the cores."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.threads = most
        self._hold_s = FIRST_HOLD_S
        self._retry_at = self._raised_at = float("-inf")

    def update(self, waited: float, free: float, now: float) -> int:
        """Update the number of threads, and return it. waited, free: `waited_share` and idle cores of the last interval."""
        if waited > CROWDED and self.threads > 1:
            failed = now < self._raised_at + TRIAL_S
            self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if failed else FIRST_HOLD_S
            self._retry_at = now + self._hold_s
            self.threads -= 1
        elif self.threads < self.most and free >= FREE_CORE and now >= self._retry_at:
            self._raised_at = now
            self.threads += 1
        return self.threads


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time so far, in seconds. ran, waited: of each thread of this process, by id. idle: over all usable cores."""

    at: float
    ran: dict[str, float]
    waited: dict[str, float]
    idle: float


def read_usage(cores: Iterable[int], proc: Path = Path("/proc")) -> Usage:
    """Read Linux's counters. Raises OSError, ValueError or IndexError if there are none, as on other systems."""
    ran, waited = {}, {}
    for thread in os.listdir(proc / "self" / "task"):
        try:
            counts = (proc / "self" / "task" / thread / "schedstat").read_text("ascii").split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has just ended.
        ran[thread], waited[thread] = int(counts[0]) / 1e9, int(counts[1]) / 1e9
    names = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in (proc / "stat").read_text("ascii").splitlines()]
    ticks = sum(int(fields[4]) + int(fields[5]) for fields in lines if fields and fields[0] in names)
    return Usage(time.monotonic(), ran, waited, ticks / os.sysconf("SC_CLK_TCK"))


def waited_share(before: Usage, after: Usage) -> float:
    """Largest share of the interval that a busy thread waited for a core; 0 if no thread was busy."""
    elapsed, longest = after.at - before.at, 0.0
    for thread, ran in after.ran.items():
        ran -= before.ran.get(thread, 0.0)
        waited = after.waited[thread] - before.waited.get(thread, 0.0)
        if ran + waited >= BUSY * elapsed:
            longest = max(longest, waited / elapsed)
    return longest


async def watch_cores(choice: ThreadChoice, use: Callable[[int], None]) -> None:
    """Call `use` whenever the number of threads changes, until cancelled."""
    cores = usable_cores()
    try:
        before = read_usage(cores)
        while True:
            await asyncio.sleep(INTERVAL_S)
            after = read_usage(cores)
            threads, waited = choice.threads, waited_share(before, after)
            idle_cores = (after.idle - before.idle) / (after.at - before.at)
            if choice.update(waited, idle_cores, after.at) != threads:
                log.info("CPU threads changed", threads=choice.threads, most=choice.most, waited=f"{waited:.0%}")
                use(choice.threads)
            before = after
    except (OSError, ValueError, IndexError) as error:
        log.info("the number of threads stays: the system has no counters of waiting times", reason=str(error))
        await asyncio.Event().wait()
