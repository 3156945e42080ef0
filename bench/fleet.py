"""`speclen bench controller` and `bench fleet`: a controller on a core of its own, loaded by simulated workers.

The workers use real gRPC and generated steps, and no models.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from grpc import aio
from rich.console import Console
from rich.table import Table

from speclen.bench.figures import spread
from speclen.cli.support.client import free_port
from speclen.cli.support.processes import Child
from speclen.process.servers import prepare_aio
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.models.machine import processor_name

METHOD = "/speclen.v1.ControlService/StreamReports"
WINDOW = 4  # unanswered messages of one worker; a real worker has about as many
NUM_TEMPLATES = 512  # different steps per worker
NUM_KINDS = 16  # workers with different steps; further ones repeat theirs
MAX_CHANNELS = 64  # also the number of workers that register concurrently
MAX_BATCH_SIZE, MAX_LENGTH = 32, 8
EOF: Any = aio.EOF  # type: ignore[attr-defined]


def simulated_steps(rng: random.Random, num: int) -> list[pb.StepReport]:
    """Plausible steps: batch sizes that change slowly, lengths around 3, and a linear cost model with 5% noise."""
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
        """Send groups at the rate of sampled steps until cancelled; with math.inf steps as fast as answers come.

        Raises RuntimeError when the controller ends the stream.
        """
        call: Any = self.channel.stream_stream(METHOD, response_deserializer=pb.StreamReportsResponse.FromString)()
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call, group / steps_per_s, group)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait(tasks, timeout=1.0)  # if both end, the reader has the reason
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
    """Channels, each with its own connection."""
    prepare_aio()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [aio.insecure_channel(address, options=options) for _ in range(num_channels)]
    for channel in channels:
        await asyncio.wait_for(channel.channel_ready(), 30.0)
    return channels


@asynccontextmanager
async def swarm(address: str, num: int) -> AsyncIterator[list[SimulatedWorker]]:
    """Registered simulated workers, which share channels."""
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


CALL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """Messages sent and reports made durable per second, and the share of a core that the controller used for them.

    sample_every: last value requested by the controller. trip_*: round trips of reports. call_*: other calls meanwhile.
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
    """Measure a controller while workers report, `group` steps per message. steps_per_s: math.inf for full speed.

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
    """Let workers report for the duration of the block. Raises the first error of a worker."""
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
    """Messages sent so far, and reports that are durable."""
    return np.array([[worker.num_messages, worker.durable_seq] for worker in workers], dtype=float).sum(axis=0)


def percentiles_ms(values_s: list[float]) -> tuple[float, float]:
    """Median and 99th percentile; NaN where there are none."""
    p50, p99 = 1e3 * np.percentile(values_s or [np.nan], [50, 99])
    return float(p50), float(p99)


async def call_times(channel: aio.Channel, seconds: float) -> list[float]:
    """Durations of other calls, made one after another for the given number of seconds."""
    stub, until, taken = rpc.ControlServiceStub(channel), time.perf_counter() + seconds, []
    while time.perf_counter() < until:
        began = time.perf_counter()
        await stub.GetControllerInfo(pb.GetControllerInfoRequest(), timeout=30.0)
        taken.append(time.perf_counter() - began)
        await asyncio.sleep(CALL_INTERVAL_S)
    return taken


STEPS_PER_S = 40.0  # per worker of a fleet
GROUP, LARGE_GROUP = 20, 64  # steps per message: half a second's, and at full speed
WARM_UP_S = 5.0
SECONDS = typer.Option(10.0, min=1.0, help="Length of a measurement.")
JSON = typer.Option(False, "--json", help="Print JSON.")


def cpu_s(process_id: int) -> float:
    """Processor time of a process so far, user and system, all threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def controller_process() -> Iterator[tuple[str, int]]:
    """Address and process id of a controller on the first core; this process uses the other cores, if there are any."""
    cores, address = sorted(os.sched_getaffinity(0)), free_port("127.0.0.1:0")
    with tempfile.TemporaryDirectory(prefix="speclen-bench-") as folder:
        arguments = ["controller", "--listen", address, "--max-streams", "16384", "--db", f"{folder}/bench.db"]
        child = Child("controller", arguments, address, Path(folder, "log"), takes_settings=False)
        os.sched_setaffinity(0, cores[:1])  # which the controller inherits
        try:
            child.start()
            os.sched_setaffinity(0, cores[1:] or cores)
            child.wait_until_serving(60.0)
            assert child.process is not None
            yield address, child.process.pid
        finally:
            os.sched_setaffinity(0, cores)
            child.stop(30.0)


def controller(
    workers: int = typer.Option(64, min=1, max=8192, help="Workers."),
    seconds: float = SECONDS,
    repeats: int = typer.Option(3, min=1, help="Repeats, interleaved."),
    as_json: bool = JSON,
) -> None:
    """Measure the maximum of reports per second, then round trips of single reports.

    Example: speclen bench controller --workers 64
    """
    setups = {
        what: partial(measured, workers, group, steps_per_s, seconds)
        for what, group, steps_per_s in (("most", LARGE_GROUP, math.inf), ("single", 1, STEPS_PER_S))
    }
    show(setups, repeats, as_json)


def fleet(
    workers: int = typer.Option(
        1000, min=1, max=16_384, help="Workers of the largest fleet; a tenth, a hundredth too."
    ),
    seconds: float = SECONDS,
    as_json: bool = JSON,
) -> None:
    """Measure a controller under fleets of simulated workers, each of 40 steps a second, with its own sampling.

    Example: speclen bench fleet --workers 1000
    """
    sizes = sorted({max(workers // 100, 1), max(workers // 10, 1), workers})
    show({f"{size} workers": partial(measured, size, GROUP, STEPS_PER_S, seconds) for size in sizes}, 1, as_json)


def measured(workers: int, group: int, steps_per_s: float, seconds: float) -> Load:
    """Load of a new controller process."""
    with controller_process() as (address, process_id):
        used = partial(cpu_s, process_id)
        return asyncio.run(load_of(address, used, workers, group, steps_per_s, WARM_UP_S, seconds))


def show(setups: Mapping[str, partial[Load]], repeats: int, as_json: bool) -> None:
    """Measure the setups in turns, and print medians with minimum and maximum."""
    loads: dict[str, list[dict[str, float]]] = {name: [] for name in setups}
    for repeat in range(repeats):
        for name, measure in setups.items():
            print(f"repeat {repeat + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            loads[name].append(asdict(measure()))
    figures = next(iter(loads.values()))[0]
    found = {
        name: {figure: spread([load[figure] for load in mine]) for figure in figures} for name, mine in loads.items()
    }
    if as_json:
        machine = {"processor": processor_name(), "cores": os.cpu_count()}
        rows = {name: {figure: asdict(value) for figure, value in mine.items()} for name, mine in found.items()}
        print(json.dumps({"machine": machine, "loads": rows}, indent=2))
        return
    table = Table("", *found, title="median (least to greatest)")
    for figure in figures:
        table.add_row(figure, *(str(mine[figure]) for mine in found.values()))
    Console().print(table)
