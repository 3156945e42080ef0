"""Simulated workers: real gRPC, made-up steps, no models."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import Any

from grpc import aio

from speclen.transport.aio import prepare_aio
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

METHOD = "/speclen.v1.ControlService/StreamReports"
STEPS_PER_S = 40.0  # of a worker that reports as it goes
WINDOW = 4  # messages of one worker on their way; a real worker has about as many
NUM_TEMPLATES = 512  # different steps of a worker
NUM_KINDS = 16  # workers with different steps; further ones repeat theirs
MAX_CHANNELS, MAX_REGISTERING = 64, 64
MAX_BATCH_SIZE, MAX_LENGTH = 32, 8
EOF: Any = aio.EOF  # type: ignore[attr-defined]


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
    """One worker with its stream. trips_s: from sending a message to reading the answer that acknowledges it."""

    def __init__(self, index: int, steps: list[pb.StepReport]) -> None:
        self.identity = pb.WorkerIdentity(worker_id=f"simulated-{index}", epoch=time.time_ns())
        self.steps = steps
        self.last_seq = self.durable_seq = self.num_messages = 0
        self.sample_every = 1
        self.trips_s: list[float] = []
        self._waiting: deque[tuple[int, float]] = deque()  # last number of a message, and when it was sent

    def message(self, num_reports: int) -> bytes:
        """The next group, serialised."""
        request = pb.StreamReportsRequest(worker=self.identity)
        for _ in range(num_reports):
            step = self.steps[self.last_seq % NUM_TEMPLATES]
            self.last_seq += 1
            step.seq = self.last_seq
            request.reports.append(step)
        return request.SerializeToString()

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
        call, per_message = open_stream(channel), self.last_seq // len(messages)
        for number, message in enumerate(messages, start=1):
            await call.write(message)
            self._waiting.append((number * per_message, time.perf_counter()))
            while len(self._waiting) >= WINDOW:
                await self._read(call)
        while self.durable_seq < self.last_seq:
            if not self._waiting:
                await asyncio.sleep(0.05)
                await call.write(b"")
            await self._read(call)
        call.cancel()

    async def report(self, channel: aio.Channel, group: int) -> None:
        """Send a group as often as sampled steps fill one, until cancelled."""
        call, every_s = open_stream(channel), group / STEPS_PER_S
        reading = asyncio.create_task(self._read_all(call))
        due = time.perf_counter() + random.random() * every_s
        try:
            while not reading.done():
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                message = self.message(group)
                self._waiting.append((self.last_seq, time.perf_counter()))
                await call.write(message)
                self.num_messages += 1
                due += every_s * self.sample_every
            reading.result()
        finally:
            reading.cancel()
            call.cancel()

    async def _read_all(self, call: Any) -> None:
        while True:
            await self._read(call)

    async def _read(self, call: Any) -> None:
        """Read one answer. Raises RuntimeError when the controller has ended the stream."""
        answer = await call.read()
        if answer is EOF:
            raise RuntimeError(f"the controller ended a stream: {await call.code()}, {await call.details()}")
        self.durable_seq, self.sample_every = answer.durable_seq, max(1, answer.sample_every)
        while self._waiting and self._waiting[0][0] <= answer.applied_seq:
            self.trips_s.append(time.perf_counter() - self._waiting.popleft()[1])


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


async def registered(address: str, num: int, seed: int = 0) -> list[tuple[SimulatedWorker, aio.Channel]]:
    """So many workers that the controller knows, with the channels that they share."""
    kinds = [
        simulated_steps(random.Random(100_003 * seed + kind), NUM_TEMPLATES) for kind in range(min(num, NUM_KINDS))
    ]
    channels = await connect(address, min(num, MAX_CHANNELS))
    turns = asyncio.Semaphore(MAX_REGISTERING)

    async def one(at: int) -> tuple[SimulatedWorker, aio.Channel]:
        worker, channel = SimulatedWorker(at, kinds[at % len(kinds)]), channels[at % len(channels)]
        async with turns:
            await worker.register(channel)
        return worker, channel

    return await asyncio.gather(*map(one, range(num)))


async def close_all(workers: list[tuple[SimulatedWorker, aio.Channel]]) -> None:
    for channel in {id(channel): channel for _, channel in workers}.values():
        await channel.close()
