"""`speclen bench fleet`: load of one controller, and times of other calls, by the number of its workers.

Workers are streams without models. Each reports its made-up steps as a real one does, sampled as its controller asks.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import typer
from grpc import aio

from speclen.bench.service.controller import ControllerProcess, controller_process, machine_facts
from speclen.bench.service.swarm import EOF, NUM_TEMPLATES, SimulatedWorker, connect, open_stream, simulated_steps
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

STEPS_PER_S = 40.0
GROUP_STEPS = 20  # in a message: half a second's
NUM_KINDS = 16  # of workers, whose steps differ
MAX_CHANNELS, MAX_REGISTERING = 32, 64
CALL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """Messages and reported steps a second, and share of a core that the controller used for them.

    sample_every: what the controller asked for in the end. call_*_ms: times of calls beside the reports.
    """

    num_workers: int
    messages_per_s: float
    reports_per_s: float
    busy: float
    sample_every: int
    call_p50_ms: float
    call_p99_ms: float


class Reporter(SimulatedWorker):
    """A worker that reports until it is cancelled."""

    def __init__(self, index: int, steps: list[pb.StepReport]) -> None:
        super().__init__(index, steps)
        self.sample_every, self.num_messages = 1, 0

    async def report(self, channel: aio.Channel) -> None:
        """Send a group as often as sampled steps fill one. Raises RuntimeError when the controller ends the stream."""
        call = open_stream(channel)
        hearing = asyncio.create_task(self._hear(call))
        due = time.perf_counter() + random.random() * GROUP_STEPS / STEPS_PER_S
        try:
            while not hearing.done():
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await call.write(self.message(GROUP_STEPS))
                self.num_messages += 1
                due += GROUP_STEPS / STEPS_PER_S * self.sample_every
            hearing.result()
        finally:
            hearing.cancel()
            call.cancel()

    async def _hear(self, call: Any) -> None:
        while (answer := await call.read()) is not EOF:
            self.sample_every = max(1, answer.sample_every)
        raise RuntimeError(f"the controller ended a stream: {await call.code()}, {await call.details()}")


async def load_of(process: ControllerProcess, num_workers: int, warm_up_s: float, seconds: float) -> Load:
    """Let so many workers report, and measure after a while."""
    kinds = [simulated_steps(random.Random(kind), NUM_TEMPLATES) for kind in range(min(num_workers, NUM_KINDS))]
    workers = [Reporter(at, kinds[at % len(kinds)]) for at in range(num_workers)]
    channels = await registered(workers, process.address)
    (apart,) = await connect(process.address, 1)
    reporting = [asyncio.create_task(each.report(channels[at % len(channels)])) for at, each in enumerate(workers)]
    try:
        await call_times(apart, warm_up_s)
        before, cpu_s, began = _sent(workers), process.cpu_s(), time.perf_counter()
        calls_s = await call_times(apart, seconds)
        taken_s, cpu_s, sent = time.perf_counter() - began, process.cpu_s() - cpu_s, _sent(workers) - before
    finally:
        for task in reporting:
            task.cancel()
        ended = await asyncio.gather(*reporting, return_exceptions=True)
        for channel in (*channels, apart):
            await channel.close()
    for error in ended:
        if isinstance(error, Exception):
            raise error
    p50_ms, p99_ms = (1e3 * np.percentile(calls_s, [50, 99])).tolist()
    sample_every = max(each.sample_every for each in workers)
    messages_per_s, reports_per_s = (sent / taken_s).tolist()
    return Load(num_workers, messages_per_s, reports_per_s, cpu_s / taken_s, sample_every, p50_ms, p99_ms)


async def registered(workers: list[Reporter], address: str) -> list[aio.Channel]:
    """Register all workers; returns the channels that they share."""
    channels = await connect(address, min(len(workers), MAX_CHANNELS))
    turns = asyncio.Semaphore(MAX_REGISTERING)

    async def register(at: int) -> None:
        async with turns:
            await workers[at].register(channels[at % len(channels)])

    await asyncio.gather(*map(register, range(len(workers))))
    return channels


def _sent(workers: list[Reporter]) -> np.ndarray:
    """Messages and steps so far."""
    return np.array([[each.num_messages, each.last_seq] for each in workers], dtype=float).sum(axis=0)


async def call_times(channel: aio.Channel, seconds: float) -> list[float]:
    """Seconds of other calls, one after the other, for so long."""
    stub, until, taken = rpc.ControlServiceStub(channel), time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        began = time.perf_counter()
        await stub.GetControllerInfo(pb.GetControllerInfoRequest(), timeout=30.0)
        taken.append(time.perf_counter() - began)
        await asyncio.sleep(CALL_INTERVAL_S)
    return taken


def fleet(
    workers: int = typer.Option(
        1000, min=1, max=16_384, help="Workers of the largest fleet; a tenth, a hundredth too."
    ),
    seconds: float = typer.Option(10.0, min=1.0, help="Length of a measurement."),
    warm_up_s: float = typer.Option(10.0, min=0.1, help="The same before it, not counted."),
    storage: bool = typer.Option(True, help="With a database."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure a real controller under fleets of simulated workers, each of 40 steps a second.

    Example: speclen bench fleet --workers 1000
    """
    loads = []
    for size in sorted({max(workers // 100, 1), max(workers // 10, 1), workers}):
        print(f"{size} workers", file=sys.stderr, flush=True)
        with controller_process("sqlite" if storage else "off", True) as process:
            loads.append(asyncio.run(load_of(process, size, warm_up_s, seconds)))
    if as_json:
        print(json.dumps({"machine": machine_facts(), "loads": [asdict(load) for load in loads]}, indent=2))
    else:
        print(as_text(loads))


def as_text(loads: list[Load]) -> str:
    """A table for people."""
    lines = [
        f"{'workers':>8} {'messages/s':>11} {'reports/s':>10} {'of a core':>10} {'sampled 1 in':>13} "
        f"{'call p50 ms':>12} {'p99 ms':>8}"
    ]
    for load in loads:
        lines.append(
            f"{load.num_workers:>8,} {load.messages_per_s:>11,.0f} {load.reports_per_s:>10,.0f} {load.busy:>10.0%} "
            f"{load.sample_every:>13} {load.call_p50_ms:>12.1f} {load.call_p99_ms:>8.1f}"
        )
    return "\n".join(lines)
