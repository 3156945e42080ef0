"""One worker process: engine thread, gRPC server and control client, from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import AsyncIterator, Callable

import structlog
from grpc import aio
from prometheus_client import CollectorRegistry

from speclen.transport.aio import SERVER_OPTIONS
from speclen.transport.credentials import ServerSecurity
from speclen.transport.health import NOT_SERVING, SERVING, Health
from speclen.transport.servers import create_server, probed, set_health
from speclen.transport.supervision import PartFailedError, Supervisor, stop_event
from speclen.v1 import generation_pb2, generation_pb2_grpc
from speclen.worker.backends import openvino
from speclen.worker.backends.threads import ThreadChoice, watch_cores
from speclen.worker.config import WorkerConfig
from speclen.worker.engine.thread import EngineThread
from speclen.worker.models.loading import resolve_device, resolve_dtype
from speclen.worker.observing.metrics import RequestMetrics, WorkerMetrics, page_of
from speclen.worker.reporting.card import finder
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.requests.request import EngineFailedError
from speclen.worker.service.admission import Admission
from speclen.worker.service.assembly import load, model_facts
from speclen.worker.service.async_engine import FAILURE_GRACE_S, AsyncEngine
from speclen.worker.service.servicer import GenerationServicer

log = structlog.get_logger()

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
STREAM_INTERVAL_S = 0.02  # chunks of a stream are gathered for this long
# The engine's thread takes the interpreter back between any two operators. At the default of 5 ms one busy moment of the
# event loop would take longer than a step.
SWITCH_INTERVAL_S = 0.0005
ENGINE = "the engine"
FRONT = "the HTTP front"
STOP_TIMEOUT_S = 5.0  # for the engine's running step at the end
FLUSH_TIMEOUT_S = 2.0  # for the controller to acknowledge the last reports

# Opens a further front for the length of a block, from settings, engine, metrics page and failure callback. The value: one
# line about it for the user, or "".
OpenFront = Callable[
    [WorkerConfig, AsyncEngine, CollectorRegistry, Callable[[BaseException], None]],
    contextlib.AbstractAsyncContextManager[str],
]


async def open_service(
    address: str, servicer: GenerationServicer, security: ServerSecurity
) -> tuple[aio.Server, int, Health]:
    """Server, port and health of the Generate service. Raises as `create_server`."""
    add = functools.partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
    return await create_server(address, SERVICE, add, security, OPTIONS)


async def serve(
    config: WorkerConfig,
    progress: Callable[[str], None],
    open_front: OpenFront = lambda *_: contextlib.nullcontext(""),
) -> None:
    """Run a worker until SIGTERM or SIGINT, then let running requests finish.

    Raises ValueError or OSError with one sentence for settings that cannot work, PartFailedError when the worker cannot
    go on.
    """
    check_config(config)
    controller = config.controller_security()
    credentials, metadata = controller.credentials(), controller.metadata()
    parts = await make_parts(config, progress)
    engine, control, supervisor = parts.engine, parts.control, parts.supervisor
    find = finder(config.controller, control.card.context)
    server, port, health_servicer = await open_service(config.listen, parts.servicer, config)
    # The front ends last, so that its callers get the reason.
    async with (
        probed(config.probe_listen, health_servicer),
        open_front(config, engine, parts.page, functools.partial(supervisor.fail, FRONT)) as front,
    ):
        running = start_engine(config, parts)
        await server.start()
        stopping = stop_event()
        reporting = functools.partial(control.run, find, credentials, metadata) if find else control.keep_bounded
        supervisor.keep("reporting", reporting)
        supervisor.watch_loop()
        await set_health(health_servicer, SERVICE, SERVING)
        progress(f"worker serving on {config.listen.rpartition(':')[0]}:{port}")
        if front:
            progress(front)
        async with ending(server, health_servicer, engine, supervisor):
            await supervisor.wait(stopping)
            progress("draining: running requests finish, new ones are refused")
            await set_health(health_servicer, SERVICE, NOT_SERVING)
            await drain(engine, control, config.drain_timeout_s, supervisor.check)
    await wait_until_stopped(running)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """A worker's parts, on one event loop. page: of metrics. thread: of the engine, which does not run yet."""

    engine: AsyncEngine
    control: ControlClient
    servicer: GenerationServicer
    page: CollectorRegistry
    supervisor: Supervisor
    thread: EngineThread


async def make_parts(config: WorkerConfig, progress: Callable[[str], None]) -> Parts:
    """Load the models, and serve the metrics page if configured. Raises ValueError with one sentence."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    supervisor, thread = Supervisor(), EngineThread()
    thread.start()
    pair, engine, control = await asyncio.wrap_future(thread.call(load, config, progress))
    num_rows = engine.limits.max_batch_size
    admission = Admission(pair, engine.max_context_length, num_rows, config.max_waiting, config.max_queue_s)
    metrics = WorkerMetrics(engine, control, supervisor.num_failures, lambda: admission.num_waiting)
    requests = RequestMetrics(metrics)
    page = page_of(metrics.registry, config.served_model_name or config.target)
    if config.metrics_listen:
        metrics.serve(config.metrics_listen, config, page)
        supervisor.keep("metrics", functools.partial(metrics.keep_page, config.metrics_listen, config, page))
    async_engine = AsyncEngine(engine, admission, requests, STREAM_INTERVAL_S, config.unread_timeout_s)
    facts = model_facts(pair, engine, control.card.context)
    servicer = GenerationServicer(async_engine, control, facts, config.keyring())
    return Parts(async_engine, control, servicer, page, supervisor, thread)


@contextlib.asynccontextmanager
async def ending(
    server: aio.Server,
    health_servicer: Health,
    async_engine: AsyncEngine,
    supervisor: Supervisor,
) -> AsyncIterator[None]:
    """End everything after the block; after a PartFailedError at once, with the error for requests."""
    grace_s = 1.0
    try:
        yield
    except PartFailedError as error:
        log.critical("the worker cannot go on and ends", reason=str(error))
        grace_s = FAILURE_GRACE_S
        await set_health(health_servicer, SERVICE, NOT_SERVING)
        async_engine.fail(EngineFailedError(f"{error}; the worker ends"))
        raise
    finally:
        async_engine.stop()
        await server.stop(grace_s)
        await supervisor.stop()
        await asyncio.to_thread(async_engine.admission.close)  # waits for a running trial of a grammar


def check_config(config: WorkerConfig) -> None:
    """Raises ValueError for settings that cannot work on this machine, OSError when a port is taken."""
    config.check_listening()
    device = resolve_device(config.device)
    if config.backend == "openvino":
        reason = openvino.why_not(device, resolve_dtype(config.dtype, device, num_parameters=0))
        if reason is not None:
            raise ValueError(f"--backend openvino: {reason}")


def start_engine(config: WorkerConfig, parts: Parts) -> asyncio.Future[None]:
    """Run the engine; its end, of any kind, ends the worker.

    On a CPU it uses fewer threads while other processes want the cores, unless --threads is given.
    """
    engine, supervisor = parts.engine.engine, parts.supervisor
    running = asyncio.wrap_future(parts.thread.call(engine.run))

    def ended(future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            supervisor.fail(ENGINE, future.exception() or RuntimeError("its loop returned"))

    running.add_done_callback(ended)
    if engine.pair.device.type == "cpu" and not config.threads and engine.num_threads > 1:
        choice = ThreadChoice(engine.num_threads)
        supervisor.keep("thread watching", functools.partial(watch_cores, choice, engine.use_threads))
    return running


async def wait_until_stopped(running: asyncio.Future[None]) -> None:
    """Raises PartFailedError when the engine's running step does not end."""
    if not (await asyncio.wait([running], timeout=STOP_TIMEOUT_S))[0]:
        error = f"{ENGINE} has not stopped within {STOP_TIMEOUT_S:g} s"
        log.critical("the worker ends without its engine", reason=error)
        raise PartFailedError(error)


async def drain(engine: AsyncEngine, control: ControlClient, timeout_s: float, check: Callable[[], None]) -> None:
    """Take no more requests, finish the running ones, and send the last reports.

    check: called while requests run; raises when waiting is useless.
    """
    engine.drain()
    deadline = time.monotonic() + timeout_s
    while engine.num_open:
        check()
        if time.monotonic() >= deadline:
            log.warning("drain timed out, ending what still runs", num_running=engine.num_open)
            break
        await asyncio.sleep(0.05)
    control.hand_over()
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while control.connected and control.buffer and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
