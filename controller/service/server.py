"""One controller process, from the database to SERVING to the last commit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NoReturn

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.service.journal import Journal, JournalSettings
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import Registry
from speclen.controller.service.relearning import relearn
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
from speclen.transport.supervision import LOOK_INTERVAL_S, PartFailedError, Supervisor
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
    """A controller that serves. supervisor: knows when it should not any more."""

    servicer: ControlServicer
    journal: Journal
    server: aio.Server
    port: int
    health: health.aio.HealthServicer
    stored: StoredState
    supervisor: Supervisor


def open_store(config: ControllerConfig) -> Store | None:
    """The database, made or brought up to date; None for a controller in memory. Raises ValueError."""
    if config.in_memory:
        return None
    retention = Retention(max_report_rows=config.keep_reports, max_days=config.keep_days)
    try:
        return Store.open(config.database, StoreConfig(retention=retention), config.move_corrupt_aside)
    except StoreError as error:
        raise ValueError(str(error)) from error


def create_service(config: ControllerConfig, store: Store | None, stored: StoredState, news: News) -> LearningService:
    """Estimator, registry and journal, as they were when the stored state was written. Raises ValueError."""
    estimator = Estimator(policy=config.policy, seed=config.seed)
    registry = Registry(time.time, config.max_workers, config.max_contexts)
    snapshots = Snapshots(estimator, registry)
    set_aside = snapshots.restore(stored)
    settings = JournalSettings(interval_s=config.commit_interval_s)
    journal = Journal(store, snapshots, time.time, news, settings, stored.last_profile_id)
    journal.note_events(set_aside)
    if store is not None and snapshots.unknown:
        relearn(estimator, snapshots.unknown, store.path)
        for context in snapshots.unknown:
            journal.note_relearned(context)
    return LearningService(estimator, registry, journal, time.time, news, stored.last_group_id)


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
        if store is not None and store.num_commits_missing:
            log.error("the database lacks commits that were acknowledged", num=store.num_commits_missing)
        controller = await create(config, store, stored)
        start_work(controller, store)
        await controller.server.start()
        await set_health(controller.health, SERVING)
        try:
            yield controller
        finally:
            await end(controller, config.drain_timeout_s)
    finally:
        if store is not None:
            await asyncio.to_thread(store.close, config.drain_timeout_s)


async def create(config: ControllerConfig, store: Store | None, stored: StoredState) -> Running:
    """Everything put together, nothing started. Raises what create_service and create_server raise."""
    news = News()
    service = create_service(config, store, stored, news)
    settings = StreamSettings(max_streams=config.max_streams, silence_s=config.silence_s)
    servicer = ControlServicer(service, news, settings, identity_of(config))
    server, port, health_servicer = await create_server(servicer, config)
    return Running(servicer, service.journal, server, port, health_servicer, stored, Supervisor())


def start_work(controller: Running, store: Store | None) -> None:
    """What goes on beside the calls."""
    service, streams, supervisor = controller.servicer.service, controller.servicer.streams, controller.supervisor
    supervisor.start("learning", service.learn_for_ever())
    supervisor.start("the journal", controller.journal.run(service.learn_all))
    supervisor.start("the sweep of streams", streams.sweep())
    supervisor.start("the delivery of news", streams.deliver())
    supervisor.start("the database", watch_store(store, controller.health))


async def end(controller: Running, timeout_s: float) -> None:
    """Drain; where something has failed, only tell: what would be saved could be wrong."""
    await set_health(controller.health, NOT_SERVING)
    failure = controller.supervisor.failure
    failed = str(failure.result()) if failure.done() else ""
    await controller.supervisor.stop()
    streams = controller.servicer.streams
    if failed:
        streams.end_all(f"the controller has failed: {failed}")
    else:
        streams.draining = "the controller is stopping"
        await streams.drain(lambda: save(controller, timeout_s))
    await controller.server.stop(grace=0.2 if failed else 1.0)


async def save(controller: Running, timeout_s: float) -> None:
    """Learn what waits and commit it."""
    await controller.servicer.service.learn_all()
    if not await controller.journal.finish(timeout_s):
        log.error("the disk did not take the last commit in time", timeout_s=timeout_s)


async def set_health(servicer: health.aio.HealthServicer, status: int) -> None:
    for name in ("", SERVICE):
        await servicer.set(name, status)


async def watch_store(store: Store | None, health_servicer: health.aio.HealthServicer) -> None:
    """Keep the store's health, and the log, up to date for ever. Raises PartFailedError when the store has ended."""
    was_ok, num_lost = None, 0
    while True:
        state = store.health() if store is not None else None
        ok = state is None or state.ok
        if state is not None and not state.alive:
            await health_servicer.set(STORE_SERVICE, NOT_SERVING)
            raise PartFailedError(state.detail)
        if ok != was_ok:
            await health_servicer.set(STORE_SERVICE, SERVING if ok else NOT_SERVING)
            if state is not None and not ok:
                log.error("the database does not take commits, learning goes on in memory", detail=state.detail)
            elif was_ok is not None:
                log.info("the database takes commits again")
        was_ok = ok
        if state is not None and (lost := state.num_rows_refused + state.num_reports_dropped) > num_lost:
            log.error("the database gave rows up, its table store_events says why", num=lost - num_lost)
            num_lost = lost
        await asyncio.sleep(LOOK_INTERVAL_S)


async def serve(config: ControllerConfig, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. announce gets one line when the controller serves. Raises ValueError, OSError.

    Ends the process with code 1 when a part of the controller has ended that must not.
    """
    check_free("--listen", config.listen)
    stopping = stop_event()
    quiet_interpreter()
    page = None
    async with running(config) as controller:
        page = serve_page(controller, config)
        host = config.listen.rpartition(":")[0]
        announce(
            f"speclen controller serving on {host}:{controller.port}, "
            f"database {'none (in memory)' if config.in_memory else config.database}, "
            f"metrics {page.address if page else 'off'}"
        )
        log.info(
            "serving",
            policy=config.policy,
            contexts=len(controller.stored.contexts),
            workers=len(controller.stored.workers),
        )
        controller.supervisor.watch_loop()
        try:
            await controller.supervisor.wait(stopping)
        except PartFailedError as error:
            await give_up(controller, error)
        log.info("stopping")
    if page is not None:  # after the end of supervision, which would take it for a failure
        page.server.shutdown()


def serve_page(controller: Running, config: ControllerConfig) -> Any:
    """The Prometheus page, if one is wanted. Raises OSError."""
    if not config.metrics_listen:
        return None
    from speclen.controller.service.metrics import (  # only then: its library takes time to import
        ControllerCollector,
        serve_metrics,
    )

    collector = ControllerCollector(controller.servicer, controller.journal, asyncio.get_running_loop())
    page = serve_metrics(collector, config)
    controller.supervisor.watch(page.thread)
    return page


async def give_up(controller: Running, error: PartFailedError) -> NoReturn:
    """Say once why, tell the workers, and end the process: there is nothing left that could be relied on."""
    log.critical("the controller ends: a part of it has failed", reason=str(error))
    with contextlib.suppress(Exception):
        await asyncio.wait_for(end(controller, 0.0), 0.6)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def quiet_interpreter() -> None:
    """Settings of Python itself that keep answers from waiting.

    Two threads share the interpreter: at the default of 5 ms, the store's could hold up an answer that long. And the
    garbage collector would look at every report several times, though reports are in no cycles.
    """
    sys.setswitchinterval(0.0005)
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)


def identity_of(config: ControllerConfig) -> control_pb2.ServerIdentity:
    """What this process says of itself."""
    return control_pb2.ServerIdentity(
        run_id=config.run_id,
        database="" if config.in_memory else str(config.database.resolve()),
        host=socket.gethostname(),
        process_id=os.getpid(),
        version=version("speclen"),
    )
