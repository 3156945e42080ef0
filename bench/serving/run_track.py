"""Serves one track with one policy and keeps everything that was seen."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from speclen.bench.serving.deployment import Deployment, start_burner
from speclen.bench.serving.load import REQUEST_TIMEOUT_S, Progress, Prompt, RequestOutcome, open_loop
from speclen.bench.serving.tracks import Track
from speclen.bench.serving.watch import Sample, watch

REFRESH_S = 1.0
LOG_EVERY_S = 20.0  # between progress lines when nobody watches a terminal


@dataclass(slots=True)
class TrackRun:
    """One run. outcomes: one per arrival, in order. cpu_s: processor seconds used by each process during the run."""

    contender: str
    repeat: int
    outcomes: list[RequestOutcome]
    samples: list[Sample]
    cpu_s: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    worker_exit: str = ""


async def run_track(
    deployment: Deployment,
    track: Track,
    prompts: Sequence[Prompt],
    repeat: int,
    num_burners: int = 1,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> TrackRun:
    """Serve the whole track. A worker that dies is not restarted: what it did not answer has failed.

    num_burners: processes that take a core each from the moment at which the track throttles the machine.
    """
    progress, samples = Progress(), list[Sample]()
    before, begin = deployment.cpu_seconds(), time.monotonic()
    async with asyncio.TaskGroup() as group, throttle(track, num_burners):
        helpers = [
            group.create_task(watch(deployment.worker.address, samples)),
            group.create_task(show(progress, f"{deployment.contender.name} #{repeat + 1}", track)),
        ]
        outcomes = await open_loop(deployment.worker.address, track.arrivals, prompts, progress, timeout_s)
        for helper in helpers:
            helper.cancel()
    after = deployment.cpu_seconds()
    code = deployment.worker.exit_code
    return TrackRun(
        contender=deployment.contender.name,
        repeat=repeat,
        outcomes=outcomes,
        samples=samples,
        cpu_s={name: after[name] - used for name, used in before.items() if name in after},
        seconds=time.monotonic() - begin,
        worker_exit="" if code is None else f"the worker ended with code {code}: {deployment.worker.last_line()}",
    )


def failed_run(contender: str, repeat: int, track: Track, reason: str) -> TrackRun:
    """A run of which nothing came."""
    outcomes = [RequestOutcome(index, arrival.at_s, error=reason) for index, arrival in enumerate(track.arrivals)]
    return TrackRun(contender, repeat, outcomes, samples=[], worker_exit=reason)


@contextlib.asynccontextmanager
async def throttle(track: Track, num_burners: int) -> AsyncIterator[None]:
    """Takes cores from the moment the track says to the end of the block."""
    burners: list[subprocess.Popen[bytes]] = []
    waiting = None
    if track.throttle_at_s is not None:
        loop = asyncio.get_running_loop()
        waiting = loop.call_later(
            track.throttle_at_s, lambda: burners.extend(start_burner() for _ in range(num_burners))
        )
    try:
        yield
    finally:
        if waiting is not None:
            waiting.cancel()
        for burner in burners:
            burner.kill()
            burner.wait()


async def show(progress: Progress, name: str, track: Track) -> None:
    """One line on stderr, rewritten every second on a terminal and repeated now and then elsewhere."""
    terminal = sys.stderr.isatty()
    begin = time.monotonic()
    while True:
        await asyncio.sleep(REFRESH_S if terminal else LOG_EVERY_S)
        elapsed = time.monotonic() - begin
        line = f"{name:<14} {elapsed:4.0f} of {track.duration_s:.0f} s: {progress}"
        print(f"\r{line:<100}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
