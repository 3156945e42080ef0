"""What a message of a worker's steps costs a controller: real gRPC, real windows, a process of its own.

Workers here are streams without models. What they send is what a worker's own code makes of made-up steps, serialised
before the clock starts. What counts is the controller's processor time, by its own count of reports: that a machine's other
core cannot send for a whole fleet, or is busy otherwise, does not change it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from grpc import aio

from speclen.bench.service.controller import ControllerProcess
from speclen.bench.service.swarm import MAX_BATCH_SIZE, MAX_LENGTH, connect, open_stream
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.engine.length_chooser import LengthChoice, StepResult
from speclen.worker.reporting.messages import to_report
from speclen.worker.reporting.window import to_window

EOF: Any = aio.EOF  # type: ignore[attr-defined]
CHANNELS = 32
REGISTERING = 64  # at once
BATCH_STEPS = 12.0  # mean number of steps between two changes of a worker's batch size
COUNT = re.compile(r"^speclen_controller_reports_total ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """What a controller took in a second, and what of a core that cost, all threads: learning and the database included."""

    messages_per_s: float
    steps_per_s: float
    busy: float


def made_up_steps(dice: random.Random, num: int, first_seq: int) -> list[tuple[int, LengthChoice, StepResult]]:
    """Records of a worker whose batch size changes about three times a second, at 40 steps a second."""
    records, batch = [], dice.randint(1, MAX_BATCH_SIZE)
    for seq in range(first_seq, first_seq + num):
        if dice.random() < 1.0 / BATCH_STEPS:
            batch = min(max(batch + dice.choice((-1, 1)), 1), MAX_BATCH_SIZE)
        length = 3
        runs = dice.choices(range(length + 1), weights=(0.3, 0.21, 0.147, 0.343), k=batch)
        histogram = tuple(map(runs.count, range(length + 1)))
        usual_s = 0.010 + 0.0012 * length + 0.00012 * batch * (length + 1)
        seconds = usual_s * dice.lognormvariate(0.0, 0.05)
        records.append((seq, LengthChoice(length, 1), StepResult(batch, length, seconds, histogram, 200.0)))
    return records


def messages_of(seed: int, num_messages: int, steps_each: int, added_up: bool) -> list[bytes]:
    """What a worker sends, serialised."""
    dice, messages = random.Random(seed), []
    for at in range(num_messages):
        records = made_up_steps(dice, steps_each, 1 + at * steps_each)
        if added_up:
            request = pb.StreamReportsRequest(windows=[to_window(records)])
        else:
            request = pb.StreamReportsRequest(reports=[to_report(*record) for record in records])
        messages.append(request.SerializeToString())
    return messages


class StreamedWorker:
    """One worker's stream: a message each window, at its time, whatever the answers do."""

    def __init__(self, index: int, messages: list[bytes], window_s: float) -> None:
        self.identity = pb.WorkerIdentity(worker_id=f"streamed-{index}", epoch=time.time_ns())
        self.messages, self.window_s = messages, window_s

    async def register(self, channel: aio.Channel, turn: asyncio.Semaphore) -> None:
        request = pb.RegisterWorkerRequest(
            worker=self.identity,
            context=pb.ContextKey(target="simulated", draft="simulated", device="none", dtype="float32"),
            limits=pb.WorkerLimits(max_batch_size=MAX_BATCH_SIZE, max_speculation_length=MAX_LENGTH),
            policy="adaptive",
        )
        async with turn:
            await rpc.ControlServiceStub(channel).RegisterWorker(request, timeout=60.0)

    async def run(self, channel: aio.Channel, start: float) -> None:
        """Send message after message until cancelled, the first at `start`."""
        call = open_stream(channel)
        await call.write(pb.StreamReportsRequest(worker=self.identity).SerializeToString())
        reader = asyncio.create_task(read_all(call))
        try:
            for number, message in enumerate(self.messages):
                await asyncio.sleep(max(0.0, start + number * self.window_s - time.perf_counter()))
                if reader.done():
                    await reader
                await call.write(message)
        finally:
            reader.cancel()
            call.cancel()


async def read_all(call: Any) -> None:
    """Read answers for ever. Raises RuntimeError when the controller ends the stream."""
    while await call.read() is not EOF:
        pass
    raise RuntimeError(f"the controller ended a stream: {await call.code()}, {await call.details()}")


async def num_reports(process: ControllerProcess) -> float:
    """Steps that the controller has learned from so far."""

    def read() -> str:
        with urllib.request.urlopen(process.metrics, timeout=30) as answer:
            return str(answer.read().decode())

    found = COUNT.search(await asyncio.to_thread(read))
    assert found is not None
    return float(found[1])


async def load_of(
    process: ControllerProcess,
    num_workers: int,
    window_s: float,
    steps_each: int,
    seconds: float,
    warm_up_s: float,
    added_up: bool = True,
) -> Load:
    """Have so many workers report for some seconds, after a warm-up. steps_each: of a message."""
    num = round(1.5 * (warm_up_s + seconds) / window_s) + 4
    kinds = [messages_of(seed, num, steps_each, added_up) for seed in range(min(num_workers, 16))]
    workers = [StreamedWorker(at, kinds[at % len(kinds)], window_s) for at in range(num_workers)]
    channels, turn = await connect(process.address, min(num_workers, CHANNELS)), asyncio.Semaphore(REGISTERING)
    pairs = [(worker, channels[at % len(channels)]) for at, worker in enumerate(workers)]
    await asyncio.gather(*(worker.register(channel, turn) for worker, channel in pairs))
    dice, start = random.Random(0), time.perf_counter() + 0.5
    tasks = [asyncio.create_task(worker.run(channel, start + dice.random() * window_s)) for worker, channel in pairs]
    await asyncio.sleep(warm_up_s)
    began, cpu_s, before = time.perf_counter(), process.cpu_s(), await num_reports(process)
    await asyncio.sleep(seconds)
    taken, cpu_s = await num_reports(process) - before, process.cpu_s() - cpu_s
    took = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    for channel in channels:
        await channel.close()
    return Load(taken / steps_each / took, taken / took, cpu_s / took)
