"""Simulated workers for `speclen bench controller`: real gRPC, made-up steps, no models.

Throughput needs messages that cost the sender next to nothing, so they are serialised before the clock starts; the
round trip is measured in an open loop, each worker reporting every step on its own at a steady rate.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from grpc import aio

from speclen.transport.aio import prepare_aio
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

METHOD = "/speclen.v1.ControlService/StreamReports"
WINDOW = 4  # messages of one worker on their way; a real worker has about as many
NUM_TEMPLATES = 512  # different steps of a worker
NUM_KINDS = 64  # workers with different steps; further ones repeat theirs
MAX_BATCH_SIZE, MAX_LENGTH = 32, 8
EOF: Any = aio.EOF  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Times from sending a report to reading the answer that acknowledges it, in milliseconds."""

    num: int
    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float


def simulated_steps(rng: random.Random, num: int) -> list[pb.StepReport]:
    """Plausible steps: a batch size that wanders, lengths around 3, the usual cost model with 5% noise."""
    steps, batch_size = [], rng.randint(1, MAX_BATCH_SIZE)
    for _ in range(num):
        batch_size = min(max(batch_size + rng.randint(-1, 1), 1), MAX_BATCH_SIZE)
        length = rng.choice((2, 3, 3, 4))
        histogram = [0] * (length + 1)
        for _ in range(batch_size):
            run = 0
            while run < length and rng.random() < 0.7:
                run += 1
            histogram[run] += 1
        usual = 0.010 + 0.0012 * length + 0.00012 * batch_size * (length + 1)
        steps.append(
            pb.StepReport(
                batch_size=batch_size,
                speculation_length=length,
                latency_s=usual * rng.lognormvariate(0.0, 0.05),
                accepted_histogram=histogram,
                mean_context_length=rng.uniform(50.0, 500.0),
                decision_version=1,
            )
        )
    return steps


class SimulatedWorker:
    """One worker with its stream, in its first and only life."""

    def __init__(self, index: int, steps: list[pb.StepReport]) -> None:
        self.identity = pb.WorkerIdentity(worker_id=f"simulated-{index}", epoch=time.time_ns())
        self.steps = steps
        self.last_seq = 0
        self.durable_seq = 0

    def message(self, num_reports: int) -> bytes:
        """The next group, serialised."""
        request = pb.StreamReportsRequest(worker=self.identity)
        for _ in range(num_reports):
            step = self.steps[self.last_seq % NUM_TEMPLATES]
            self.last_seq += 1
            step.seq = self.last_seq
            request.reports.append(step)
        return request.SerializeToString()

    def introduction(self) -> bytes:
        """The sender's name: goes before a stream's first message, since fields of serialised messages add up."""
        return pb.StreamReportsRequest(worker=self.identity).SerializeToString()

    async def register(self, channel: aio.Channel) -> None:
        await rpc.ControlServiceStub(channel).RegisterWorker(
            pb.RegisterWorkerRequest(
                worker=self.identity,
                context=pb.ContextKey(target="simulated", draft="simulated", device="none", dtype="float32"),
                limits=pb.WorkerLimits(max_batch_size=MAX_BATCH_SIZE, max_speculation_length=MAX_LENGTH),
                policy="adaptive",
            ),
            timeout=30.0,
        )

    async def flood(self, channel: aio.Channel, messages: list[bytes]) -> None:
        """Send all messages, at most WINDOW ahead of the answers; return when all are durable."""
        call = open_stream(channel)
        waiting: deque[int] = deque()
        per_message = self.last_seq // len(messages)
        for number, message in enumerate(messages, start=1):
            await call.write(message)
            waiting.append(number * per_message)
            while len(waiting) >= WINDOW:
                await self._read(call, waiting)
        while waiting:
            await self._read(call, waiting)
        while self.durable_seq < self.last_seq:
            await asyncio.sleep(0.05)
            await call.write(b"")
            await self._read(call, waiting)
        call.cancel()

    async def _read(self, call: Any, waiting: deque[int]) -> int:
        """Read one answer; returns how many messages it acknowledged."""
        answer = await call.read()
        assert answer is not EOF, "the controller ended the stream"
        self.durable_seq = answer.durable_seq
        num = 0
        while waiting and waiting[0] <= answer.applied_seq:
            waiting.popleft()
            num += 1
        return num

    async def pace(self, channel: aio.Channel, steps_per_s: float, seconds: float, phase_s: float) -> list[float]:
        """Report every step on its own at a steady rate; returns the round trips in seconds."""
        call = open_stream(channel)
        waiting: deque[int] = deque()
        sent_at: deque[float] = deque()
        trips: list[float] = []

        async def read_answers() -> None:
            while True:
                num = await self._read(call, waiting)
                now = time.perf_counter()
                trips.extend(now - sent_at.popleft() for _ in range(num))

        reader = asyncio.create_task(read_answers())
        start = time.perf_counter() + phase_s
        for number in range(int(seconds * steps_per_s)):
            await asyncio.sleep(max(0.0, start + number / steps_per_s - time.perf_counter()))
            message = self.message(1)
            waiting.append(self.last_seq)
            sent_at.append(time.perf_counter())
            await call.write(message)
        async with asyncio.timeout(30.0):
            while waiting:
                await asyncio.sleep(0.01)
        reader.cancel()
        call.cancel()
        return trips


async def num_learned(channel: aio.Channel) -> int:
    """Samples that are in the learned tables; older ones fade."""
    answer = await rpc.ControlServiceStub(channel).GetLearnedTable(pb.GetLearnedTableRequest())
    return sum(row.num_steps for table in answer.tables for row in table.rows)


def make_workers(num: int, seed: int) -> list[SimulatedWorker]:
    kinds = [
        simulated_steps(random.Random(seed * 100_003 + kind), NUM_TEMPLATES) for kind in range(min(num, NUM_KINDS))
    ]
    return [SimulatedWorker(index, kinds[index % len(kinds)]) for index in range(num)]


def open_stream(channel: aio.Channel) -> Any:
    """A StreamReports call that sends bytes as they are."""
    return channel.stream_stream(METHOD, response_deserializer=pb.StreamReportsResponse.FromString)()


async def connect(address: str, num_channels: int) -> list[aio.Channel]:
    """Channels with a connection each."""
    prepare_aio()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options=options) for _ in range(num_channels)]
    for channel in channels:
        await asyncio.wait_for(channel.channel_ready(), 30.0)
    return channels


async def throughput(
    address: str,
    num_workers: int,
    group_size: int,
    num_reports: int,
    seed: int,
    started: Callable[[], None],
) -> tuple[int, float]:
    """Reports learned from and the seconds until the last was durable, at a fresh controller.

    started is called when the clock starts.
    """
    workers = make_workers(num_workers, seed)
    groups = max(1, num_reports // (num_workers * group_size))
    messages = [[worker.message(group_size) for _ in range(groups)] for worker in workers]
    channels = await connect(address, min(num_workers, 64))
    for index, worker in enumerate(workers):
        await worker.register(channels[index % len(channels)])
    started()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, worker in enumerate(workers):
            tasks.create_task(worker.flood(channels[index % len(channels)], messages[index]))
    seconds = time.perf_counter() - start
    for worker in workers:
        assert worker.durable_seq == worker.last_seq, "a report was not durable in the end"
    num = num_workers * groups * group_size
    if not await num_learned(channels[0]):
        raise RuntimeError(f"the controller acknowledged {num} reports and learned nothing from them")
    for channel in channels:
        await channel.close()
    return num, seconds


async def round_trips(
    address: str,
    num_workers: int,
    steps_per_s: float,
    seconds: float,
    seed: int,
    warm_up_s: float,
    started: Callable[[], None],
) -> RoundTrips:
    """Round trips of all workers after a warm-up."""
    workers = make_workers(num_workers, seed)
    channels = await connect(address, num_workers)
    for worker, channel in zip(workers, channels, strict=True):
        await worker.register(channel)
    rng = random.Random(seed)
    phases = [rng.random() / steps_per_s for _ in workers]
    pairs = list(zip(workers, channels, phases, strict=True))
    if warm_up_s > 0:
        await asyncio.gather(*(w.pace(c, steps_per_s, warm_up_s, phase) for w, c, phase in pairs))
    started()
    results = await asyncio.gather(*(w.pace(c, steps_per_s, seconds, phase) for w, c, phase in pairs))
    trips = 1e3 * np.concatenate([np.asarray(result) for result in results])
    for channel in channels:
        await channel.close()
    p50, p99, p999 = np.percentile(trips, (50.0, 99.0, 99.9))
    return RoundTrips(len(trips), float(p50), float(p99), float(p999), float(trips.max()))
