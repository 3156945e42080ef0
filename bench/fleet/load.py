"""One controller under the reports of its part of a fleet: real gRPC, real windows, a process of its own.

Workers here are streams without models. What they send is what a worker's own code makes of made-up steps, serialised
before the clock starts, so that the machine's other core can send for thousands of them.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
WAIT = re.compile(r'speclen_controller_learning_wait_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)')


@dataclass(slots=True)
class Load:
    """What was measured of one controller. Times in seconds.

    busy: share of a core, all threads. trips: from sending a message to its answer. waits: (bound, share of workers' reports
    learned from within it). deliveries: from the first worker that had a new table to each of the others.
    late: by how much messages were sent after their time, which is the sender's fault, not the controller's.
    """

    num_workers: int
    num_steps: int
    num_messages: int
    seconds: float
    busy: float
    cpu_us_per_message: float
    cpu_us_per_step: float
    trips: np.ndarray
    waits: list[tuple[float, float]]
    deliveries: np.ndarray
    late: np.ndarray


@dataclass(slots=True)
class Told:
    """When each worker had which version of its table."""

    first: dict[int, float] = field(default_factory=dict)
    delays: list[float] = field(default_factory=list)

    def note(self, known: int, version: int, now: float) -> None:
        """A worker that had one version has a later one now, and with it all in between."""
        self.first.setdefault(version, now)
        self.delays += [now - at for each, at in self.first.items() if known < each <= version]


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

    def __init__(self, index: int, messages: list[bytes], window_s: float, told: Told) -> None:
        self.identity = pb.WorkerIdentity(worker_id=f"streamed-{index}", epoch=time.time_ns())
        self.messages, self.window_s, self.told = messages, window_s, told
        self.version = 0
        self.trips: list[float] = []
        self.late: list[float] = []

    async def register(self, channel: aio.Channel, turn: asyncio.Semaphore) -> None:
        request = pb.RegisterWorkerRequest(
            worker=self.identity,
            context=pb.ContextKey(target="simulated", draft="simulated", device="none", dtype="float32"),
            limits=pb.WorkerLimits(max_batch_size=MAX_BATCH_SIZE, max_speculation_length=MAX_LENGTH),
            policy="adaptive",
        )
        async with turn:
            await rpc.ControlServiceStub(channel).RegisterWorker(request, timeout=60.0)

    async def run(self, channel: aio.Channel, start: float, counted_from: int) -> None:
        """Send all messages, the first at `start`; trips and delays count from one message on."""
        call = open_stream(channel)
        sent_at: dict[int, float] = {}
        await call.write(pb.StreamReportsRequest(worker=self.identity).SerializeToString())
        steps_each = [0]

        async def read() -> None:
            acknowledged = 0
            while acknowledged < len(self.messages):
                answer = await call.read()
                if answer is EOF:
                    raise RuntimeError(f"the controller ended a stream: {await call.code()}, {await call.details()}")
                now = time.perf_counter()
                if answer.HasField("table") and answer.table.decision_version != self.version:
                    self.told.note(self.version, answer.table.decision_version, now)
                    self.version = answer.table.decision_version
                while acknowledged in sent_at and answer.applied_seq >= (acknowledged + 1) * steps_each[0]:
                    if acknowledged >= counted_from:
                        self.trips.append(now - sent_at[acknowledged])
                    acknowledged += 1

        steps_each[0] = _last_seq(self.messages[0])
        reader = asyncio.create_task(read())
        for number, message in enumerate(self.messages):
            due = start + number * self.window_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent_at[number] = time.perf_counter()
            if number >= counted_from:
                self.late.append(sent_at[number] - due)
            if reader.done():
                await reader
            await call.write(message)
        await asyncio.wait_for(reader, 60.0)
        call.cancel()


def _last_seq(message: bytes) -> int:
    request = pb.StreamReportsRequest.FromString(message)
    return request.windows[-1].last_seq if request.windows else request.reports[-1].seq


def waits_of(page: str) -> dict[float, float]:
    """Cumulative counts by bound, from a metrics page."""
    return {float(bound.replace("+Inf", "inf")): float(count) for bound, count in WAIT.findall(page)}


def read_page(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


async def load_of(
    process: ControllerProcess, num_workers: int, steps_per_s: float, window_s: float, seconds: float, warm_up_s: float
) -> Load:
    """Have so many workers report for some seconds, after a warm-up."""
    steps_each = max(1, round(steps_per_s * window_s))
    counted_from, num = round(warm_up_s / window_s), round((warm_up_s + seconds) / window_s)
    kinds = [messages_of(seed, num, steps_each, True) for seed in range(min(num_workers, 32))]
    told, turn = Told(), asyncio.Semaphore(REGISTERING)
    workers = [StreamedWorker(at, kinds[at % len(kinds)], window_s, told) for at in range(num_workers)]
    channels = await connect(process.address, min(num_workers, CHANNELS))
    pairs = [(worker, channels[at % len(channels)]) for at, worker in enumerate(workers)]
    await asyncio.gather(*(worker.register(channel, turn) for worker, channel in pairs))
    dice, start = random.Random(0), time.perf_counter() + 1.0
    tasks = [
        asyncio.create_task(worker.run(channel, start + dice.random() * window_s, counted_from))
        for worker, channel in pairs
    ]
    await asyncio.sleep(max(0.0, start + warm_up_s - time.perf_counter()))
    cpu_s, before = process.cpu_s(), waits_of(await asyncio.to_thread(read_page, process.metrics))
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    cpu_s, after = process.cpu_s() - cpu_s, waits_of(await asyncio.to_thread(read_page, process.metrics))
    took = time.perf_counter() - began
    await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return _summed(workers, told, cpu_s, took, before, after, steps_each)


def _summed(
    workers: list[StreamedWorker],
    told: Told,
    cpu_s: float,
    seconds: float,
    before: dict[float, float],
    after: dict[float, float],
    steps_each: int,
) -> Load:
    trips = np.concatenate([worker.trips for worker in workers])
    late = np.concatenate([worker.late for worker in workers])
    num_messages = len(trips)
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    total = max(max(counts.values(), default=0.0), 1.0)
    return Load(
        num_workers=len(workers),
        num_steps=num_messages * steps_each,
        num_messages=num_messages,
        seconds=seconds,
        busy=cpu_s / seconds,
        cpu_us_per_message=1e6 * cpu_s / num_messages,
        cpu_us_per_step=1e6 * cpu_s / (num_messages * steps_each),
        trips=trips,
        waits=[(bound, counts[bound] / total) for bound in sorted(counts)],
        deliveries=np.array(told.delays or [0.0]),
        late=late,
    )
