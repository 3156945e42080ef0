"""One worker process: engine thread, gRPC server and control client, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from speclen.transport.address import check_exposure, check_free
from speclen.transport.aio import prepare_aio
from speclen.transport.credentials import ServerSecurity
from speclen.transport.stopping import stop_event
from speclen.v1 import generation_pb2, generation_pb2_grpc
from speclen.worker.backends.threads import ThreadChoice, set_threads, watch_cores
from speclen.worker.config import WorkerConfig, parse_policy
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.thread import EngineThread
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.file import foreign_parts, table_from_file
from speclen.worker.profiling.seeding import seed_controller
from speclen.worker.reporting.control_client import ControlClient, WorkerCard
from speclen.worker.reporting.identity import context_key
from speclen.worker.reporting.length_table import DEFAULT_LENGTH, LengthTable
from speclen.worker.service.async_engine import AsyncEngine
from speclen.worker.service.labelled import page_of
from speclen.worker.service.metrics import WorkerMetrics
from speclen.worker.service.request_metrics import RequestMetrics
from speclen.worker.service.servicer import GenerationServicer, ModelFacts

log = structlog.get_logger()

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a port shared in silence
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
# The engine's thread takes the interpreter back from the event loop between any two operators. At the default of 5 ms
# one busy moment of gRPC would cost more than a whole step.
STREAM_INTERVAL_S = 0.02  # chunks of a stream are gathered for this long
SWITCH_INTERVAL_S = 0.0005

# Opens a further way in for the length of a block: from settings, engine, metrics page, and whether the worker can serve.
# The value: one line about it for the user, or nothing.
OpenFront = Callable[
    [WorkerConfig, AsyncEngine, CollectorRegistry, Callable[[], bool]], contextlib.AbstractAsyncContextManager[str]
]


def initial_table(config: WorkerConfig, max_length: int) -> tuple[LengthTable, bool]:
    """The table a worker starts with, and whether it follows the controller's.

    Raises ValueError for a policy that is unknown or asks for a length over the limit.
    """
    kind, length = parse_policy(config.policy)
    if kind == "fixed":
        assert length is not None
        if length > max_length:
            raise ValueError(f"--policy fixed:{length} is over --max-length {max_length}")
        return LengthTable.constant(length, config.max_batch_size, "policy"), False
    if kind == "none":
        return LengthTable.constant(0, config.max_batch_size, "policy"), False
    if config.profile is not None:
        return table_from_file(config.profile, config.max_batch_size, max_length), kind == "adaptive"
    if kind == "profile":
        raise ValueError("--policy profile needs --profile FILE: make one with `speclen profile run`")
    return LengthTable.constant(min(DEFAULT_LENGTH, max_length), config.max_batch_size, "default"), True


def make_control(config: WorkerConfig, pair: ModelPair) -> ControlClient:
    """The control client with the worker's name, context and first table."""
    max_length = config.max_length if pair.draft is not None else 0
    table, follow = initial_table(config, max_length)
    context = context_key(pair)
    if config.profile is not None and (different := foreign_parts(config.profile, context)):
        # Used all the same: it was named on purpose, and a controller corrects it. But not in silence.
        log.warning("the profile was measured elsewhere", profile=str(config.profile), different="; ".join(different))
    card = WorkerCard(
        worker_id=config.worker_id or f"{socket.gethostname()}:{config.listen.rpartition(':')[2]}",
        epoch=time.time_ns(),
        context=context,
        max_batch_size=config.max_batch_size,
        max_speculation_length=max_length,
        address=config.listen,
        policy=config.policy,
    )
    return ControlClient(card, table, follow)


def model_facts(pair: ModelPair, control: ControlClient) -> ModelFacts:
    return ModelFacts(
        context=control.card.context,
        target_path=pair.target_name,
        draft_path=pair.draft_name,
        num_target_parameters=num_parameters(pair.target),
        num_draft_parameters=num_parameters(pair.draft) if pair.draft is not None else 0,
    )


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def load(config: WorkerConfig, progress: Callable[[str], None]) -> tuple[ModelPair, Engine, ControlClient]:
    """Models, engine and control client, ready to run. Raises ValueError with one sentence for bad settings."""
    parse_policy(config.policy)
    progress(f"loading {config.target} and {config.draft or 'no draft'}")
    pair = load_pair(config.target, config.draft or None, config.device, config.dtype)
    set_threads(config.threads, pair)
    control = make_control(config, pair)
    engine_config = EngineConfig(
        max_batch_size=config.max_batch_size,
        max_speculation_length=control.card.max_speculation_length,
        max_waiting=config.max_waiting,
        max_kv_tokens=config.max_kv_tokens or None,
    )
    engine = Engine(pair, engine_config, control)
    control.card = replace(control.card, max_batch_size=engine.max_batch_size)  # fewer rows may fit
    return pair, engine, control


async def create_server(
    address: str, servicer: GenerationServicer, security: ServerSecurity
) -> tuple[aio.Server, int, health.aio.HealthServicer]:
    """A server with Generation, health and reflection, not started yet, and its port.

    Raises OSError when the address cannot be bound, ValueError when certificates or token cannot be read.
    """
    prepare_aio()
    server = aio.server(options=SERVER_OPTIONS, interceptors=security.interceptors())
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, security.add_port(server, address), health_servicer


async def serve(config: WorkerConfig, progress: Callable[[str], None], open_front: OpenFront) -> None:
    """Run a worker until SIGTERM or SIGINT, then let running requests finish."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    security, controller_security = config.server_security(), config.controller_security()
    check_exposure("--listen", config.listen, security.encrypted, security.authenticated, config.insecure)
    if config.metrics_listen:
        check_exposure("--metrics-listen", config.metrics_listen, False, False, config.insecure)
    credentials, metadata = controller_security.credentials(), controller_security.metadata()
    check_free("--listen", config.listen)
    torch_thread = EngineThread()
    torch_thread.start()
    pair, engine, control = await asyncio.wrap_future(torch_thread.call(load, config, progress))
    if config.controller and control.follow:
        await asyncio.wrap_future(torch_thread.call(seed_controller, config, pair, control.card, progress))
    metrics = WorkerMetrics(engine, control)
    request_metrics = RequestMetrics(metrics)
    page = page_of(metrics.registry, config.served_model_name or config.target)
    if config.metrics_listen:
        metrics.serve(config.metrics_listen, page)
    facts = model_facts(pair, control)
    servicer = GenerationServicer(engine, pair, control, facts, request_metrics, STREAM_INTERVAL_S)
    server, port, health_servicer = await create_server(config.listen, servicer, security)
    running = asyncio.wrap_future(torch_thread.call(engine.run))
    await server.start()
    stopping = stop_event()
    reporting = control.run(config.controller, credentials, metadata) if config.controller else None
    tasks = [asyncio.create_task(reporting)] if reporting is not None else []
    if pair.device.type == "cpu" and not config.threads and engine.num_threads > 1:
        tasks.append(asyncio.create_task(watch_cores(ThreadChoice(engine.num_threads), engine.use_threads)))
    async_engine = AsyncEngine(engine, pair.tokenizer, request_metrics, STREAM_INTERVAL_S)
    try:
        async with open_front(config, async_engine, page, lambda: not (stopping.is_set() or running.done())) as front:
            await set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
            progress(f"worker serving on {config.listen.rpartition(':')[0]}:{port}")
            if front:
                progress(front)
            await stopping.wait()
            progress("draining: running requests finish, new ones are refused")
            await set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
            engine.drain()
            await wait_until_idle(engine, config.drain_timeout_s)
            await flush_reports(control)
    finally:
        async_engine.close()
        engine.stop()
        await server.stop(grace=1.0)
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.wait([running], timeout=5.0)


async def set_health(servicer: health.aio.HealthServicer, status: int) -> None:
    await servicer.set("", status)
    await servicer.set(SERVICE, status)


async def wait_until_idle(engine: Engine, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        load = engine.load()
        if not load.num_running and not load.num_waiting:
            await asyncio.sleep(0.1)  # the last messages leave
            return
        await asyncio.sleep(0.05)
    log.warning("drain timed out, aborting what still runs", num_running=engine.load().num_running)


async def flush_reports(control: ControlClient, timeout_s: float = 2.0) -> None:
    """Give the controller a moment to acknowledge the last reports."""
    deadline = time.monotonic() + timeout_s
    while control.connected and control.buffer.records and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
