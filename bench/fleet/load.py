"""What a message of a worker's steps costs a controller: real gRPC, real windows, a process of its own, its database on.

Workers here are streams without models. What they send is what a worker's own code makes of made-up steps, serialised
before the clock starts, each at its own time as a worker of 40 steps a second would. What counts is the controller's
processor time, learning and storage included, while all of them send: that other programs want the cores as well hardly
changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from speclen.bench.service.controller import ControllerProcess
from speclen.bench.service.swarm import EOF, MAX_BATCH_SIZE, SimulatedWorker, connect, open_stream
from speclen.v1 import control_pb2 as pb
from speclen.worker.engine.length_chooser import LengthChoice, StepResult
from speclen.worker.reporting.messages import to_report
from speclen.worker.reporting.window import to_window

CHANNELS = 32
REGISTERING = 64  # at once
STEPS_PER_S, IDLE_S = 40.0, 0.6  # IDLE_S: between two messages without steps
BATCH_STEPS = 12.0  # mean number of steps between two changes of a worker's batch size
LENGTH = 3
RUNS = (0.3, 0.21, 0.147, 0.343)  # chances of accepted runs at that length, where 0.7 of drafted tokens are accepted


@dataclass(frozen=True, slots=True)
class Load:
    """What a controller took, in how many seconds, and the processor time that it spent meanwhile, all threads."""

    num_workers: int
    num_messages: int
    num_steps: int
    cpu_s: float
    seconds: float

    @property
    def message_s(self) -> float:
        return self.cpu_s / self.num_messages

    @property
    def steps_per_core_s(self) -> float:
        return self.num_steps / self.cpu_s


def made_up_steps(dice: random.Random, num: int, first_seq: int) -> list[tuple[int, LengthChoice, StepResult]]:
    """Records of a worker whose batch size changes about three times a second, at 40 steps a second."""
    records, batch = [], dice.randint(1, MAX_BATCH_SIZE)
    for seq in range(first_seq, first_seq + num):
        if dice.random() < 1.0 / BATCH_STEPS:
            batch = min(max(batch + dice.choice((-1, 1)), 1), MAX_BATCH_SIZE)
        runs = dice.choices(range(LENGTH + 1), weights=RUNS, k=batch)
        histogram = tuple(map(runs.count, range(LENGTH + 1)))
        usual_s = 0.010 + 0.0012 * LENGTH + 0.00012 * batch * (LENGTH + 1)
        seconds = usual_s * dice.lognormvariate(0.0, 0.05)
        records.append((seq, LengthChoice(LENGTH, 1), StepResult(batch, LENGTH, seconds, histogram, 200.0)))
    return records


def messages_of(seed: int, num_messages: int, steps_each: int, added_up: bool) -> list[bytes]:
    """What a worker sends, serialised. added_up: as windows; else every step by itself. Without steps: empty messages."""
    dice, messages = random.Random(seed), []
    if not steps_each:
        return [b""] * num_messages
    for at in range(num_messages):
        records = made_up_steps(dice, steps_each, 1 + at * steps_each)
        if added_up:
            request = pb.StreamReportsRequest(windows=[to_window(records)])
        else:
            request = pb.StreamReportsRequest(reports=[to_report(*record) for record in records])
        messages.append(request.SerializeToString())
    return messages


async def registered(workers: Sequence[SimulatedWorker], address: str) -> list[aio.Channel]:
    """Make workers known to a controller; the channels that they share."""
    channels, turns = await connect(address, min(len(workers), CHANNELS)), asyncio.Semaphore(REGISTERING)

    async def register(at: int) -> None:
        async with turns:
            await workers[at].register(channels[at % len(channels)])

    await asyncio.gather(*map(register, range(len(workers))))
    return channels


@contextlib.asynccontextmanager
async def heard(
    channel: aio.Channel, hear: Callable[[Any], Coroutine[Any, Any, None]]
) -> AsyncIterator[tuple[Any, asyncio.Task[None]]]:
    """A stream of reports, and the task in which its answers are heard; both end with the block."""
    call = open_stream(channel)
    hearing = asyncio.create_task(hear(call))
    try:
        yield call, hearing
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        call.cancel()


async def next_answer(call: Any) -> pb.StreamReportsResponse:
    """Raises RuntimeError when the controller ends the stream."""
    answer = await call.read()
    if answer is EOF:
        raise RuntimeError(f"the controller ended a stream: {await call.code()}, {await call.details()}")
    return answer


class Sender(SimulatedWorker):
    """A worker with messages at hand."""

    def __init__(self, index: int, num_messages: int, steps_each: int) -> None:
        super().__init__(index, [])
        self.last_seq, self.num_answers = num_messages * steps_each, 0 if steps_each else num_messages
        self.interval_s = steps_each / STEPS_PER_S or IDLE_S

    async def send(self, channel: aio.Channel, messages: list[bytes], phase_s: float) -> None:
        """Send all, the first after phase_s, and return when all are durable."""
        began = time.perf_counter() + phase_s
        async with heard(channel, self.hear) as (call, hearing):
            for number, message in enumerate([self.introduction() + messages[0], *messages[1:]]):
                await asyncio.sleep(max(0.0, began + number * self.interval_s - time.perf_counter()))
                await call.write(message)
            while not hearing.done():  # as a worker without steps does: what is durable comes with the answer
                await asyncio.wait([hearing], timeout=1.0)
                if not hearing.done():
                    await call.write(b"")
            hearing.result()

    async def hear(self, call: Any) -> None:
        """Read answers until all have come or all is durable. Raises RuntimeError when the controller ends the stream."""
        while self.durable_seq < self.last_seq or self.num_answers > 0:
            answer = await next_answer(call)
            self.durable_seq, self.num_answers = answer.durable_seq, self.num_answers - 1


async def load_of(
    process: ControllerProcess,
    num_workers: int,
    num_messages: int,
    steps_each: int,
    added_up: bool = True,
    num_warm: int = 0,
) -> Load:
    """Have so many workers send so many messages each, and measure from when each has sent the first num_warm of them until
    each has sent the last. What was asked for afterwards, whether all is durable, is no part of it.
    """
    kinds = [messages_of(seed, num_messages, steps_each, added_up) for seed in range(min(num_workers, 16))]
    senders = [Sender(at, num_messages, steps_each) for at in range(num_workers)]
    channels = await registered(senders, process.address)

    async def clock(num_sent: int) -> tuple[float, float]:
        await asyncio.sleep(num_sent * senders[0].interval_s)
        return process.cpu_s(), time.perf_counter()

    async with asyncio.TaskGroup() as tasks:
        clocks = tasks.create_task(clock(num_warm)), tasks.create_task(clock(num_messages))
        for at, sender in enumerate(senders):
            phase_s = sender.interval_s * at / num_workers
            tasks.create_task(sender.send(channels[at % len(channels)], kinds[at % len(kinds)], phase_s))
    (before_s, began), (after_s, ended) = (each.result() for each in clocks)
    for channel in channels:
        await channel.close()
    total = num_workers * (num_messages - num_warm)
    return Load(num_workers, total, total * steps_each, after_s - before_s, ended - began)
