"""A worker's gRPC service in front of a real engine, in the test's own event loop."""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import pytest
from grpc import aio

from speclen.process.servers import prepare_aio
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc as rpc
from speclen.worker.engine.engine import Engine
from speclen.worker.engine.inbox import EngineThread
from speclen.worker.frontend.admission import Admission
from speclen.worker.frontend.async_engine import AsyncEngine
from speclen.worker.frontend.generation_servicer import GenerationServicer
from speclen.worker.frontend.worker_metrics import RequestMetrics, WorkerMetrics
from speclen.worker.frontend.worker_server import model_facts
from speclen.worker.reporting.control_client import ControlClient
from tests.support import engines
from tests.support.control_parts import client
from tests.support.waiting import PATIENCE_S

ENDLESS = pb.SamplingParams(max_tokens=200, ignore_eos=True)


class Served:
    """A running engine, its service on a free port, and a stub."""

    def __init__(
        self, engine: Engine, parts: tuple[AsyncEngine, WorkerMetrics, GenerationServicer], port: int, stub: Any
    ) -> None:
        self.async_engine, self.metrics, self.servicer = parts
        self.engine, self.port, self.stub = engine, port, stub

    def num_slow_readers(self) -> float:
        return self.metrics.registry.get_sample_value("speclen_slow_readers_total") or 0.0

    async def fails(self, request: pb.GenerateRequest) -> tuple[str, str]:
        """Code and details of a request that must fail."""
        with pytest.raises(aio.AioRpcError) as raised:
            await self.all(request)
        return raised.value.code().name, raised.value.details() or ""

    async def all(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        return [response async for response in self.stub.Generate(request, timeout=PATIENCE_S)]


def parts_of(
    engine: Engine, control: ControlClient, max_waiting: int, interval_s: float, unread_timeout_s: float
) -> tuple[AsyncEngine, WorkerMetrics, GenerationServicer]:
    """The parts between a server and an engine, and their metrics."""
    pair = engine.pair
    admission = Admission(pair, engine.max_context_length, engine.limits.max_batch_size, max_waiting)
    metrics = WorkerMetrics(engine, control, {"metrics": 0}, num_at_admission=lambda: admission.num_waiting)
    async_engine = AsyncEngine(engine, admission, RequestMetrics(metrics), interval_s, unread_timeout_s)
    facts = model_facts(pair, engine, control.card.context)
    return async_engine, metrics, GenerationServicer(async_engine, control, facts)


@contextlib.asynccontextmanager
async def served(unread_timeout_s: float = 30.0, rows: int = 4) -> AsyncIterator[Served]:
    engine = engines.make_engine(max_batch_size=rows)
    parts = parts_of(engine, client(), 8, 0.001, unread_timeout_s)
    prepare_aio()
    server = aio.server()
    rpc.add_GenerationServiceServicer_to_server(parts[2], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    thread = EngineThread()
    thread.start()
    thread.call(engine.run)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(engine, parts, port, rpc.GenerationServiceStub(channel))
        engine.stop()
        await server.stop(0.1)


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """The engine's running step lasts until the value is set, or the block ends."""
    go_on, launch = threading.Event(), engine.runner.launch

    def wait_and_launch(plan: Any) -> Any:
        assert go_on.wait(PATIENCE_S)
        return launch(plan)

    with mock.patch.object(engine.runner, "launch", wait_and_launch):
        try:
            yield go_on
        finally:
            go_on.set()


def tokenized(*ids: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), **fields)


def sampled(**sampling: Any) -> pb.GenerateRequest:
    return tokenized(1, sampling_params=pb.SamplingParams(**sampling))
