"""A fleet's share of a real controller: workers without models, who send what they are asked for, and when they are.

What single kinds of message cost says what a controller could take; this, whether it takes what it asks for itself: its
windows, the share that it learns from, its answers and its database, all at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from grpc import aio

from speclen.bench.fleet.load import STEPS_PER_S, heard, made_up_steps, next_answer, registered
from speclen.bench.service.controller import ControllerProcess
from speclen.bench.service.swarm import SimulatedWorker, connect
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.reporting.window import to_window

KINDS = 16  # of workers, whose steps differ
FIRST_WINDOW_S = 2.5  # until one is asked for
WARM_S, MEASURED_S = 10.0, 10.0
ASKED_EVERY_S = 0.05  # between two calls of somebody else


@dataclass(frozen=True, slots=True)
class Crowd:
    """What so many workers sent a second, how much of a core that took, and how long somebody else's call took beside it."""

    num_workers: int
    messages_per_s: float
    steps_per_s: float
    busy: float
    call_p50_s: float
    call_p99_s: float


class Obedient(SimulatedWorker):
    """A worker that adds up its steps for as long as its controller asks."""

    def __init__(self, index: int) -> None:
        super().__init__(index, [])
        self.kind, self.window_s = index % KINDS, FIRST_WINDOW_S
        self.num_messages = 0

    async def serve(self, channel: aio.Channel) -> None:
        """Report until cancelled. Raises RuntimeError when the controller ends the stream."""
        first, due = self.introduction(), time.perf_counter() + random.random() * FIRST_WINDOW_S
        async with heard(channel, self._hear) as (call, hearing):
            while not hearing.done():
                await asyncio.sleep(due - time.perf_counter())
                await call.write(first + self._next_window())
                first, due, self.num_messages = b"", due + self.window_s, self.num_messages + 1
            hearing.result()

    async def _hear(self, call: Any) -> None:
        while True:
            answer = await next_answer(call)
            if answer.HasField("thinning") and answer.thinning.window_s:
                self.window_s = answer.thinning.window_s

    def _next_window(self) -> bytes:
        """The steps since the last one, serialised."""
        window = pb.ReportWindow()
        window.CopyFrom(_window(self.kind, max(2, round(STEPS_PER_S * self.window_s))))
        window.first_seq += self.last_seq
        for each in window.sums:
            each.first_seq += self.last_seq
        for report in window.reports:
            report.seq += self.last_seq
        self.last_seq = window.last_seq = window.last_seq + self.last_seq
        return pb.StreamReportsRequest(windows=[window]).SerializeToString()


@cache
def _window(kind: int, num_steps: int) -> pb.ReportWindow:
    """A window of so many steps, from the first one on."""
    return to_window(made_up_steps(random.Random(kind), num_steps, 1))


async def crowd(
    process: ControllerProcess, num_workers: int, warm_s: float = WARM_S, measured_s: float = MEASURED_S
) -> Crowd:
    """Let so many workers report, and measure after a while, when the controller has told each what it wants of it."""
    workers = [Obedient(at) for at in range(num_workers)]
    channels = await registered(workers, process.address)
    (apart,) = await connect(process.address, 1)
    serving = [asyncio.create_task(each.serve(channels[at % len(channels)])) for at, each in enumerate(workers)]
    try:
        await _calls(apart, warm_s)
        cpu_s, began, sent = process.cpu_s(), time.perf_counter(), _sent(workers)
        calls_s = await _calls(apart, measured_s)
        seconds, cpu_s = time.perf_counter() - began, process.cpu_s() - cpu_s
        messages, steps = (_sent(workers) - sent).tolist()
    finally:
        for each in serving:
            each.cancel()
        ended = await asyncio.gather(*serving, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    for channel in (*channels, apart):
        await channel.close()
    p50_s, p99_s = np.percentile(calls_s, [50, 99]).tolist()
    return Crowd(num_workers, messages / seconds, steps / seconds, cpu_s / seconds, p50_s, p99_s)


def _sent(workers: list[Obedient]) -> np.ndarray:
    """Messages and steps so far."""
    return np.array([[each.num_messages, each.last_seq] for each in workers], dtype=float).sum(axis=0)


async def _calls(channel: aio.Channel, seconds: float) -> list[float]:
    """How long calls of somebody else take, one after the other, for so long."""
    stub, until, taken = rpc.ControlServiceStub(channel), time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        began = time.perf_counter()
        await stub.GetControllerInfo(pb.GetControllerInfoRequest(), timeout=30.0)
        taken.append(time.perf_counter() - began)
        await asyncio.sleep(ASKED_EVERY_S)
    return taken
