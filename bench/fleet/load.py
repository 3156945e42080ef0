"""Figures of a controller under load: reports that become durable, and other calls while a fleet reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from grpc import aio

from speclen.bench.fleet.swarm import SimulatedWorker, connect, swarm
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

CALL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """Messages sent and reports made durable a second, and share of a core that the controller used for them.

    sample_every: as the controller asked in the end. trip_*: round trips of reports. call_*: other calls meanwhile.
    """

    messages_per_s: float
    reports_per_s: float
    busy: float
    cpu_us_per_report: float
    sample_every: int
    trip_p50_ms: float
    trip_p99_ms: float
    call_p50_ms: float
    call_p99_ms: float


async def load_of(
    address: str,
    cpu_s: Callable[[], float],
    num_workers: int,
    group: int,
    steps_per_s: float,
    warm_up_s: float,
    seconds: float,
) -> Load:
    """Let so many workers report, group steps in a message, and measure after a while. steps_per_s: math.inf for the most.

    cpu_s: processor time of the controller so far. Raises RuntimeError when the controller ends a stream.
    """
    async with swarm(address, num_workers) as workers, reporting(workers, group, steps_per_s):
        (apart,) = await connect(address, 1)
        await call_times(apart, warm_up_s)
        for worker in workers:
            worker.trips_s.clear()
        before, used_s, began = counts(workers), cpu_s(), time.perf_counter()
        calls_s = await call_times(apart, seconds)
        taken_s, used_s, done = time.perf_counter() - began, cpu_s() - used_s, counts(workers) - before
        await apart.close()
    messages, reports = done.tolist()
    trips_s = [trip for worker in workers for trip in worker.trips_s]
    sample_every = max(worker.sample_every for worker in workers)
    return Load(
        *(messages / taken_s, reports / taken_s, used_s / taken_s, 1e6 * used_s / max(reports, 1), sample_every),
        *percentiles_ms(trips_s),
        *percentiles_ms(calls_s),
    )


@asynccontextmanager
async def reporting(workers: list[SimulatedWorker], group: int, steps_per_s: float) -> AsyncIterator[None]:
    """Workers report while this lasts; their first error is raised."""
    tasks = [asyncio.create_task(worker.report(group, steps_per_s)) for worker in workers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def counts(workers: list[SimulatedWorker]) -> np.ndarray:
    """Messages sent and reports that are durable, so far."""
    return np.array([[worker.num_messages, worker.durable_seq] for worker in workers], dtype=float).sum(axis=0)


def percentiles_ms(values_s: list[float]) -> tuple[float, float]:
    """Median and 99th percentile; NaN where there are none."""
    p50, p99 = 1e3 * np.percentile(values_s or [np.nan], [50, 99])
    return float(p50), float(p99)


async def call_times(channel: aio.Channel, seconds: float) -> list[float]:
    """Seconds of other calls, one after the other, for so long."""
    stub, until, taken = rpc.ControlServiceStub(channel), time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        began = time.perf_counter()
        await stub.GetControllerInfo(pb.GetControllerInfoRequest(), timeout=30.0)
        taken.append(time.perf_counter() - began)
        await asyncio.sleep(CALL_INTERVAL_S)
    return taken
