"""One controller process, from the database to SERVING to the last commit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.controller import Controller
from speclen.controller.service.fleet import Fleet
from speclen.controller.service.journal import Journal, JournalSettings
from speclen.controller.service.messages import identity_of
from speclen.controller.service.registry import Registry
from speclen.controller.service.servicer import ControlServicer
from speclen.controller.service.snapshots import Snapshots
from speclen.controller.service.streams import StreamSettings
from speclen.store.connection import StoreError
from speclen.store.database import Store, StoreConfig
from speclen.store.records import StoredState
from speclen.store.retention import Retention
from speclen.transport.address import check_free
from speclen.transport.aio import prepare_aio
from speclen.transport.stopping import stop_event
from speclen.v1 import control_pb2, control_pb2_grpc

log = structlog.get_logger()

SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
# The store's health under a name of its own: with a full disk the controller goes on serving, and says so here.
STORE_SERVICE = "speclen.store"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

MAX_MESSAGE_BYTES = 4 * 2**20  # 1,024 reports of length 64 take 200 kB, the largest profile 2 MB
SPARE_CALLS = 1024  # unary calls in progress beside the streams
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a port shared in silence
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # What is read ahead per stream. It bounds memory (64 MB at 4,096 streams), and the time for which pings stay unread
    # when all streams send more than can be taken: what has arrived is worked off before the sockets are looked at.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    # A vanished peer is noticed by its silence (StreamSettings.silence_s); pings are for connections without a stream.
    # Keepalive alone would take over a minute, hence the ping timeout; a short one would cut off workers under overload.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 40_000),
    ("grpc.http2.ping_timeout_ms", 40_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Workers ping, too, and may do so with no call open.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]


@dataclass(slots=True)
class Running:
    """A controller that serves."""

    servicer: ControlServicer
    server: aio.Server
    port: int
    health: health.aio.HealthServicer
    stored: StoredState


def open_store(config: ControllerConfig) -> Store | None:
    """The database, made or brought up to date; None for a controller in memory. Raises ValueError."""
    if config.in_memory:
        return None
    retention = Retention(max_report_rows=config.keep_reports, max_days=config.keep_days)
    try:
        return Store.open(config.database, StoreConfig(retention=retention), config.move_corrupt_aside)
    except StoreError as error:
        raise ValueError(str(error)) from error


def create_fleet(config: ControllerConfig, store: Store | None, stored: StoredState) -> Fleet:
    """Estimator, registry and journal, as they were when the stored state was written. Raises ValueError."""
    estimator = Controller(policy=config.policy, seed=config.seed)
    registry = Registry(time.time, config.max_workers, config.max_contexts)
    snapshots = Snapshots(estimator, registry)
    snapshots.restore(stored)
    journal = Journal(
        store,
        snapshots,
        time.time,
        lambda workers: None,
        JournalSettings(interval_s=config.commit_interval_s),
        stored.last_profile_id,
    )
    return Fleet(estimator, registry, journal, time.time, stored.last_group_id)


def create_servicer(fleet: Fleet, config: ControllerConfig) -> ControlServicer:
    """The service, told by the journal when something became durable."""
    settings = StreamSettings(max_streams=config.max_streams, silence_s=config.silence_s)
    servicer = ControlServicer(fleet, settings, identity_of(config))
    fleet.journal.on_durable = servicer.streams.wake
    return servicer


async def create_server(
    servicer: ControlServicer, config: ControllerConfig
) -> tuple[aio.Server, int, health.aio.HealthServicer]:
    """A server with control, health and reflection, not started yet, its port, and the health to set.

    Raises OSError when the address cannot be bound, ValueError when a certificate or the token cannot be read.
    """
    prepare_aio()
    security = config.security
    server = aio.server(
        options=SERVER_OPTIONS,
        interceptors=security.interceptors(),
        maximum_concurrent_rpcs=config.max_streams + SPARE_CALLS,
    )
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, security.add_port(server, config.listen), health_servicer


@contextlib.asynccontextmanager
async def running(config: ControllerConfig) -> AsyncIterator[Running]:
    """A controller that serves until the block ends, and then drains. Raises ValueError, OSError with one sentence."""
    store = open_store(config)
    try:
        stored = store.load() if store is not None else StoredState()
        servicer = create_servicer(create_fleet(config, store, stored), config)
        server, port, health_servicer = await create_server(servicer, config)
        await server.start()
        tasks = [
            asyncio.create_task(servicer.fleet.learn_for_ever()),
            asyncio.create_task(servicer.fleet.journal.run(servicer.fleet.learn_all)),
            asyncio.create_task(servicer.streams.sweep()),
            asyncio.create_task(servicer.streams.deliver()),
            asyncio.create_task(watch_store(servicer, health_servicer)),
        ]
        for task in tasks:
            task.add_done_callback(die_with)
        await set_health(health_servicer, SERVING)
        try:
            yield Running(servicer, server, port, health_servicer, stored)
        finally:
            await set_health(health_servicer, NOT_SERVING)
            for task in tasks:
                task.cancel()
            await drain(servicer, server, config.drain_timeout_s)
    finally:
        if store is not None:
            await asyncio.to_thread(store.close, config.drain_timeout_s)


def die_with(task: asyncio.Task[None]) -> None:
    """A background task that fails takes the process down: half a controller would lie about what is durable."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task failed, ending the process", exc_info=task.exception())
        os._exit(1)


async def drain(servicer: ControlServicer, server: aio.Server, timeout_s: float) -> None:
    """Refuse what is new, save what was learned, tell the workers, end."""
    servicer.streams.draining = True

    async def save() -> None:
        await servicer.fleet.learn_all()
        if not await servicer.fleet.journal.finish(timeout_s):
            log.error("the disk did not take the last commit in time", timeout_s=timeout_s)

    await servicer.streams.drain(save)
    await server.stop(grace=1.0)


async def set_health(servicer: health.aio.HealthServicer, status: int) -> None:
    for name in ("", SERVICE):
        await servicer.set(name, status)


async def watch_store(servicer: ControlServicer, health_servicer: health.aio.HealthServicer) -> None:
    """Keep the store's health, and the log, up to date for ever."""
    store, was_ok = servicer.fleet.journal.store, None
    while True:
        state = store.health() if store is not None else None
        ok = state is None or state.ok
        if ok != was_ok:
            await health_servicer.set(STORE_SERVICE, SERVING if ok else NOT_SERVING)
            if state is not None and not ok:
                log.error("the database does not take commits, learning goes on in memory", detail=state.detail)
            elif was_ok is not None:
                log.info("the database takes commits again")
        was_ok = ok
        await asyncio.sleep(0.5)


async def serve(config: ControllerConfig, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. announce gets one line when the controller serves. Raises ValueError, OSError."""
    check_free("--listen", config.listen)
    stopping = stop_event()
    quiet_interpreter()
    async with running(config) as controller:
        page = metrics_server = None
        if config.metrics_listen:
            from speclen.controller.service.metrics import serve_metrics  # only then: its library takes time to import

            page, metrics_server = serve_metrics(controller.servicer, config)
        host = config.listen.rpartition(":")[0]
        announce(
            f"speclen controller serving on {host}:{controller.port}, "
            f"database {'none (in memory)' if config.in_memory else config.database}, metrics {page or 'off'}"
        )
        log.info(
            "serving",
            policy=config.policy,
            contexts=len(controller.stored.contexts),
            workers=len(controller.stored.workers),
        )
        await stopping.wait()
        log.info("stopping")
        if metrics_server is not None:
            metrics_server.shutdown()


def quiet_interpreter() -> None:
    """Settings of Python itself that keep answers from waiting.

    Two threads share the interpreter: at the default of 5 ms, the store's could hold up an answer that long. And the
    garbage collector would look at every report several times, though reports are in no cycles.
    """
    sys.setswitchinterval(0.0005)
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
