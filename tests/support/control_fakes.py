"""A controller in this process or in one of its own, and the messages of a plausible worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry, generate_latest

from speclen.cli.support.client import Client
from speclen.cli.support.processes import Child
from speclen.controller.config import ControllerConfig
from speclen.controller.service.controller_metrics import ControllerCollector
from speclen.controller.service.controller_server import Running, running
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from tests.support.addresses import free_address
from tests.support.waiting import PATIENCE_S

CONTEXT = pb.ContextKey(target="t", draft="d", device="cpu:test", dtype="float32")
LIMITS = pb.WorkerLimits(max_batch_size=32, max_speculation_length=4)
CELLS = [(batch, length) for batch in (1, 8, 32) for length in range(5)]
PROFILE = pb.ImportProfileRequest(
    context=CONTEXT,
    cells=[
        pb.ProfileCell(batch_size=b, speculation_length=k, step_s=0.01 + 0.002 * k + 0.0005 * b * k, num_steps=50)
        for b, k in CELLS
    ],
    survival=[0.9, 0.8, 0.7, 0.6],
    num_survival_rows=[1000] * 4,
    source="test",
)


@dataclass
class Served:
    """A running controller, a channel to it and a stub."""

    controller: Running
    channel: aio.Channel
    stub: Any
    address: str

    @property
    def service(self) -> Any:
        return self.controller.servicer.learner


@contextlib.asynccontextmanager
async def served(tmp_path: Path, **options: Any) -> AsyncIterator[Served]:
    """A controller with its database in a folder."""
    config = ControllerConfig(listen="127.0.0.1:0", db=tmp_path / "test.db", **options)
    async with running(config) as controller:
        address = f"127.0.0.1:{controller.port}"
        async with aio.insecure_channel(address) as channel:
            yield Served(controller, channel, rpc.ControlServiceStub(channel), address)


@contextlib.contextmanager
def running_controller(folder: Path, *options: str, run_id: str = "", client: Client | None = None) -> Iterator[Child]:
    """A process that keeps its database in the folder, stopped at the end. client: that waits for it."""
    folder.mkdir(exist_ok=True)
    address = free_address()
    arguments = ["controller", "--listen", address, "--data-dir", str(folder), "--run-id", run_id, *options]
    child = Child("controller", arguments, address, folder / "log", run_id=run_id, client=client or Client())
    child.start()
    try:
        child.wait_until_serving(PATIENCE_S)
        yield child
    finally:
        child.stop(20)


def identity(worker_id: str = "w", epoch: int = 7) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(worker_id=worker_id, epoch=epoch)


def registration(worker_id: str = "w", epoch: int = 7, **changes: Any) -> pb.RegisterWorkerRequest:
    fields = {"context": CONTEXT, "limits": LIMITS, "policy": "adaptive", **changes}
    return pb.RegisterWorkerRequest(worker=identity(worker_id, epoch), **fields)


def report(seq: int, **changes: Any) -> pb.StepReport:
    """A step of 4 sequences at length 2 in 20 ms, with changes."""
    fields = {
        "batch_size": 4,
        "speculation_length": 2,
        "latency_s": 0.02,
        "accepted_histogram": [1, 2, 1],
        "mean_context_length": 100.0,
    }
    return pb.StepReport(seq=seq, **{**fields, **changes})


def group(first: int, last: int, **changes: Any) -> pb.StreamReportsRequest:
    """Reports first..last, both included."""
    return pb.StreamReportsRequest(
        worker=identity(), reports=[report(seq, **changes) for seq in range(first, last + 1)]
    )


async def to_the_end(call: Any) -> None:
    """Read the answers of a stream until it ends."""
    while await call.read() is not aio.EOF:
        pass


async def status_of(awaitable: Any) -> tuple[str, str]:
    """Code and details with which a call fails."""
    try:
        await awaitable
    except aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the call should have failed")


async def page_of(controller: Running) -> str:
    """Metrics as Prometheus reads them, in another thread than the controller's."""
    registry = CollectorRegistry()
    registry.register(ControllerCollector(controller.servicer, controller.journal, asyncio.get_running_loop()))
    return (await asyncio.to_thread(generate_latest, registry)).decode()


async def eventful_page(at: Served) -> str:
    """Metrics after reports at the length in use and at another one, again, with a gap, wrong, and of an older epoch."""
    await at.stub.RegisterWorker(registration())
    call = at.stub.StreamReports()

    async def send(*reports: pb.StepReport) -> None:
        await call.write(pb.StreamReportsRequest(worker=identity(), reports=reports))
        await call.read()
        await at.service.learn_all()

    await send(*map(report, range(1, 31)))
    at.service.refresh()
    length = next(iter(at.service.estimators.values())).table().arm_for(4).speculation_length
    for seq, used in ((31, length), (32, length), (33, (length + 1) % 5)):
        await send(report(seq, speculation_length=used, accepted_histogram=[4] + [0] * used))
    await send(report(33), report(38), report(39, latency_s=-1.0))
    await status_of(at.stub.ReportStep(pb.ReportStepRequest(worker=identity(epoch=6), report=report(1))))
    await at.stub.GetLearnedTable(pb.GetLearnedTableRequest())
    at.service.refresh()
    return await page_of(at.controller)
