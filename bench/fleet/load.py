"""Figures of a controller under load: reports until durable, and other calls while a fleet reports."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from grpc import aio

from speclen.bench.fleet.swarm import SimulatedWorker, close_all, connect, registered
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

CALL_INTERVAL_S = 0.05


class Process(Protocol):
    """A controller."""

    address: str

    def cpu_s(self) -> float:
        """Processor time so far, all threads."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Reports a second until the last is durable, and the controller's processor time per report, all threads."""

    reports_per_s: float
    cpu_us_per_report: float


@dataclass(frozen=True, slots=True)
class Load:
    """Messages and reported steps a second, and share of a core that the controller used for them.

    sample_every: as the controller asked in the end. trip_*: round trips of reports. call_*: other calls meanwhile.
    """

    num_workers: int
    messages_per_s: float
    reports_per_s: float
    busy: float
    sample_every: int
    trip_p50_ms: float
    trip_p99_ms: float
    call_p50_ms: float
    call_p99_ms: float


async def throughput(process: Process, num_workers: int, group: int, num_reports: int, seed: int = 0) -> Throughput:
    """Send as many groups as a fresh controller takes. Raises RuntimeError when it learned nothing from them.

    Messages are serialised before the clock starts, so that they cost the sender next to nothing.
    """
    workers = await registered(process.address, num_workers, seed)
    groups = max(1, num_reports // (num_workers * group))
    messages = [[worker.message(group) for _ in range(groups)] for worker, _ in workers]
    began, cpu_s = time.perf_counter(), process.cpu_s()
    async with asyncio.TaskGroup() as tasks:
        for (worker, channel), mine in zip(workers, messages, strict=True):
            tasks.create_task(worker.flood(channel, mine))
    taken_s, cpu_s = time.perf_counter() - began, process.cpu_s() - cpu_s
    num = num_workers * groups * group
    if not await num_learned(workers[0][1]):
        raise RuntimeError(f"the controller acknowledged {num} reports and learned nothing from them")
    await close_all(workers)
    return Throughput(num / taken_s, 1e6 * cpu_s / num)


async def num_learned(channel: aio.Channel) -> int:
    """Samples that are in the learned tables; older ones fade."""
    answer = await rpc.ControlServiceStub(channel).GetLearnedTable(pb.GetLearnedTableRequest())
    return sum(row.num_steps for table in answer.tables for row in table.rows)


async def load_of(process: Process, num_workers: int, group: int, warm_up_s: float, seconds: float) -> Load:
    """Let so many workers report, group steps in a message, and measure after a while."""
    fleet = await registered(process.address, num_workers)
    workers = [worker for worker, _ in fleet]
    (apart,) = await connect(process.address, 1)
    reporting = [asyncio.create_task(worker.report(channel, group)) for worker, channel in fleet]
    try:
        await call_times(apart, warm_up_s)
        for worker in workers:
            worker.trips_s.clear()
        before, cpu_s, began = _sent(workers), process.cpu_s(), time.perf_counter()
        calls_s = await call_times(apart, seconds)
        taken_s, cpu_s, sent = time.perf_counter() - began, process.cpu_s() - cpu_s, _sent(workers) - before
    finally:
        for task in reporting:
            task.cancel()
        ended = await asyncio.gather(*reporting, return_exceptions=True)
        await close_all(fleet)
        await apart.close()
    for error in ended:
        if isinstance(error, Exception):
            raise error
    messages_per_s, reports_per_s = (sent / taken_s).tolist()
    sample_every = max(worker.sample_every for worker in workers)
    trips_s = [trip for worker in workers for trip in worker.trips_s]
    (trip_p50, trip_p99), (call_p50, call_p99) = _percentiles_ms(trips_s), _percentiles_ms(calls_s)
    return Load(
        *(num_workers, messages_per_s, reports_per_s, cpu_s / taken_s, sample_every),
        *(trip_p50, trip_p99, call_p50, call_p99),
    )


def _sent(workers: list[SimulatedWorker]) -> np.ndarray:
    """Messages and steps so far."""
    return np.array([[worker.num_messages, worker.last_seq] for worker in workers], dtype=float).sum(axis=0)


def _percentiles_ms(values_s: list[float]) -> tuple[float, float]:
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
