"""Simulated workers: real gRPC, made-up steps, no models."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from speclen.transport.aio import prepare_aio
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

METHOD = "/speclen.v1.ControlService/StreamReports"
WINDOW = 4  # messages of one worker on their way; a real worker has about as many
NUM_TEMPLATES = 512  # different steps of a worker
NUM_KINDS = 16  # workers with different steps; further ones repeat theirs
MAX_CHANNELS = 64  # also: workers that register at a time
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

    def __init__(self, index: int, steps: list[pb.StepReport], channel: aio.Channel) -> None:
        self.identity = pb.WorkerIdentity(worker_id=f"simulated-{index}", epoch=time.time_ns())
        self.steps, self.channel = steps, channel
        self.last_seq = self.durable_seq = self.num_messages = 0
        self.sample_every = 1
        self.trips_s: list[float] = []
        self._room = asyncio.Semaphore(WINDOW)
        self._waiting: deque[tuple[int, float]] = deque()  # last number of a message, and when it was sent

    async def register(self) -> None:
        await rpc.ControlServiceStub(self.channel).RegisterWorker(
            pb.RegisterWorkerRequest(
                worker=self.identity,
                context=pb.ContextKey(target="simulated", draft="simulated", device="none", dtype="float32"),
                limits=pb.WorkerLimits(max_batch_size=MAX_BATCH_SIZE, max_speculation_length=MAX_LENGTH),
                policy="adaptive",
            ),
            timeout=30.0,
        )

    async def report(self, group: int, steps_per_s: float) -> None:
        """Send a group as often as sampled steps fill one, until cancelled; as fast as answers come at math.inf steps.

        Raises RuntimeError when the controller ends the stream.
        """
        call: Any = self.channel.stream_stream(METHOD, response_deserializer=pb.StreamReportsResponse.FromString)()
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call, group / steps_per_s, group)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait(tasks, timeout=1.0)  # where both end, the reader knows why
            for task in tasks:
                if task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()

    async def _write(self, call: Any, every_s: float, group: int) -> None:
        due = time.perf_counter() + random.random() * every_s
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self._room.acquire()
            message = self._message(group)
            self._waiting.append((self.last_seq, time.perf_counter()))
            await call.write(message)
            self.num_messages += 1
            due += every_s * self.sample_every

    def _message(self, num_reports: int) -> bytes:
        request = pb.StreamReportsRequest(worker=self.identity)
        for _ in range(num_reports):
            step = self.steps[self.last_seq % NUM_TEMPLATES]
            self.last_seq += 1
            step.seq = self.last_seq
            request.reports.append(step)
        return request.SerializeToString()

    async def _read(self, call: Any) -> None:
        while (answer := await call.read()) is not EOF:
            self.durable_seq, self.sample_every = answer.durable_seq, max(1, answer.sample_every)
            while self._waiting and self._waiting[0][0] <= answer.applied_seq:
                self.trips_s.append(time.perf_counter() - self._waiting.popleft()[1])
                self._room.release()
        raise RuntimeError(f"the controller ended a stream: {await call.code()}, {await call.details()}")


async def connect(address: str, num_channels: int) -> list[aio.Channel]:
    """Channels with a connection each."""
    prepare_aio()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options=options) for _ in range(num_channels)]
    for channel in channels:
        await asyncio.wait_for(channel.channel_ready(), 30.0)
    return channels


@asynccontextmanager
async def swarm(address: str, num: int) -> AsyncIterator[list[SimulatedWorker]]:
    """So many workers that the controller knows; they share channels."""
    kinds = [simulated_steps(random.Random(kind), NUM_TEMPLATES) for kind in range(min(num, NUM_KINDS))]
    channels = await connect(address, min(num, MAX_CHANNELS))
    workers = [SimulatedWorker(at, kinds[at % len(kinds)], channels[at % len(channels)]) for at in range(num)]
    for at in range(0, num, MAX_CHANNELS):
        await asyncio.gather(*(worker.register() for worker in workers[at : at + MAX_CHANNELS]))
    try:
        yield workers
    finally:
        for channel in channels:
            await channel.close()
