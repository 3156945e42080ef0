"""One controller process: its parts, made from the configuration, and its life from the database to the last commit."""

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
from functools import partial
from typing import Any, NoReturn

import structlog
from grpc import aio

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator import Estimators
from speclen.controller.service.control_servicer import ControlServicer
from speclen.controller.service.journal import Journal
from speclen.controller.service.learner import Learner, Totals
from speclen.controller.service.registry import Registry
from speclen.controller.service.restoring import restore, restore_guards
from speclen.controller.service.streams import StreamSettings
from speclen.process.embedded import published
from speclen.process.health import NOT_SERVING, SERVING, Health
from speclen.process.servers import SERVER_OPTIONS, create_server, probed, set_health
from speclen.process.settings import UNIX, check_free, installed_version
from speclen.process.supervision import LOOK_INTERVAL_S, PartFailedError, Supervisor, stop_event
from speclen.store.connection import StoreError
from speclen.store.database import Store, StoreConfig
from speclen.store.retention import Retention
from speclen.store.schema import StoredState
from speclen.v1 import control_pb2, control_pb2_grpc

log = structlog.get_logger()

SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name

MAX_MESSAGE_BYTES = 4 * 2**20  # 1,024 reports of length 64 take 200 kB, the largest profile 2 MB
SPARE_CALLS = 1024  # unary calls in progress, in addition to the streams
OPTIONS = [
    *SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # Bytes read ahead per stream. This bounds memory (64 MB at 4,096 streams), and the time for which pings stay unread if
    # all streams send more than can be handled: data that has arrived is handled before the sockets are read again.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    # A dead peer with a stream is detected by its silence (StreamSettings.silence_s); pings are for other connections.
    # Keepalive alone would take over a minute, hence the ping timeout; a short one would disconnect workers under overload.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 40_000),
    ("grpc.http2.ping_timeout_ms", 40_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.http2.max_pings_without_data", 0),
]
# The store has its own name in the health service: with a full disk the controller continues to serve, and reports it here.
STORE_SERVICE = "speclen.store"


@dataclass(slots=True)
class Running:
    """A controller that serves. supervisor: knows when it can no longer serve."""

    servicer: ControlServicer
    journal: Journal
    server: aio.Server
    port: int
    health: Health
    stored: StoredState
    supervisor: Supervisor


def open_store(config: ControllerConfig) -> Store:
    """Open the database, which is created if it does not exist. Raises ValueError."""
    retention = Retention(max_report_rows=config.keep_reports, max_days=config.keep_days)
    try:
        return Store.open(config.database, StoreConfig(retention=retention), config.move_corrupt_aside)
    except StoreError as error:
        raise ValueError(str(error)) from error


def create_service(config: ControllerConfig, store: Store, stored: StoredState) -> Learner:
    """Make a learner with estimator, registry and journal from the stored state. Raises ValueError."""
    estimators, totals = Estimators(), Totals()
    registry = Registry(time.time, config.max_workers, config.max_contexts)
    forgotten, set_aside = restore(estimators, registry, stored, store.path)
    journal = Journal(store, estimators, time.time, config.commit_interval_s, stored.last_profile_id)
    journal.note_events(set_aside)
    for context in forgotten:
        journal.note_context(context)
    learner = Learner(estimators, registry, journal, totals, stored.last_group_id)
    journal.note_events(restore_guards(learner.guards, registry, store.path))
    return learner


async def create(config: ControllerConfig, store: Store, stored: StoredState) -> Running:
    """Make all parts of a controller without starting them. Raises as create_service and create_server."""
    learner = create_service(config, store, stored)
    settings = StreamSettings(max_streams=config.max_streams, silence_s=config.silence_s)
    servicer = ControlServicer(learner, settings, identity_of(config))
    add = partial(control_pb2_grpc.add_ControlServiceServicer_to_server, servicer)
    opened = await create_server(config.listen, SERVICE, add, config, OPTIONS, config.max_streams + SPARE_CALLS)
    return Running(servicer, learner.journal, *opened, stored, Supervisor())


def identity_of(config: ControllerConfig) -> control_pb2.ServerIdentity:
    """The identity of this process."""
    return control_pb2.ServerIdentity(
        run_id=config.run_id,
        database=str(config.database.resolve()),
        host=socket.gethostname(),
        process_id=os.getpid(),
        version=installed_version(),
    )


@contextlib.asynccontextmanager
async def running(config: ControllerConfig) -> AsyncIterator[Running]:
    """Run a controller while the block runs, then drain it. Raises ValueError or OSError with one sentence.

    Raises OSError at the end, too, if what was learned last is not in the database.
    """
    store = open_store(config)
    try:
        stored = store.load()
        if store.num_commits_missing:
            log.error("the database lacks commits that were acknowledged", num=store.num_commits_missing)
        controller = await create(config, store, stored)
        start_work(controller, store)
        await controller.server.start()
        await set_health(controller.health, SERVICE, SERVING)
        async with probed(config.probe_listen, controller.health):
            try:
                yield controller
            finally:
                await end(controller, config.drain_timeout_s)
    finally:
        await asyncio.to_thread(store.close, config.drain_timeout_s)
    if reason := unstored(controller, store):
        raise OSError(f"{store.path} lacks what was learned last: {reason}")


def start_work(controller: Running, store: Store) -> None:
    """Start the work in the background of the calls."""
    learner, streams, supervisor = controller.servicer.learner, controller.servicer.streams, controller.supervisor
    supervisor.start("learning", learner.run())
    supervisor.start("the journal", controller.journal.run(learner.learn_all))
    supervisor.start("the sweep of streams", streams.sweep())
    supervisor.start("the delivery of updates", streams.deliver())
    supervisor.start("the database", watch_store(store, controller.health))


async def end(controller: Running, timeout_s: float) -> None:
    """Drain. After a failure only tell the workers, since what would be saved could be wrong."""
    await set_health(controller.health, SERVICE, NOT_SERVING)
    failure = controller.supervisor.failure
    failed = str(failure.result()) if failure.done() else ""
    await controller.supervisor.stop()
    streams = controller.servicer.streams
    if failed:
        streams.end_all(f"the controller has failed: {failed}")
    else:
        streams.draining = "the controller is stopping"
        await streams.drain(lambda: save(controller, timeout_s))
    await controller.server.stop(grace=1.0)  # time for each call to end with the reason


async def save(controller: Running, timeout_s: float) -> None:
    """Learn from waiting reports and commit them. `unstored` tells the result."""
    await controller.servicer.learner.learn_all()
    with contextlib.suppress(StoreError):  # the store has ended
        if not await controller.journal.finish(timeout_s):
            log.error("the disk did not take the last commit in time", timeout_s=timeout_s)


def unstored(controller: Running, store: Store) -> str:
    """Why what an ended controller learned last is not on disk; "" if it is. store: closed."""
    failure, health = controller.supervisor.failure, store.health()
    if failure.done():
        return str(failure.result())
    if not health.alive:
        return health.detail
    return "; ".join(dict.fromkeys(map(str, controller.journal.given_up.values())))


async def watch_store(store: Store, health_servicer: Health) -> None:
    """Keep the store's health and the log up to date until cancelled. Raises PartFailedError if the store has ended."""
    was_ok, num_lost = None, 0
    while True:
        state = store.health()
        if not state.alive:
            await health_servicer.set(STORE_SERVICE, NOT_SERVING)
            raise PartFailedError(state.detail)
        if state.ok != was_ok:
            await health_servicer.set(STORE_SERVICE, SERVING if state.ok else NOT_SERVING)
            if not state.ok:
                log.error("the database does not accept all rows; learning continues in memory", detail=state.detail)
            elif was_ok is not None:
                log.info("the database accepts all rows again")
        was_ok = state.ok
        if (lost := state.num_rows_refused) > num_lost:
            log.error("the database refused rows, its table store_events says why", num=lost - num_lost)
            num_lost = lost
        await asyncio.sleep(LOOK_INTERVAL_S)


async def serve(config: ControllerConfig, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. announce: called with one line once the controller serves. Raises ValueError or OSError.

    Exits the process with code 1 if a part ends without which the controller cannot serve.
    """
    is_unix = config.listen.startswith(UNIX)  # that of a killed controller may be left: gRPC replaces it
    if not is_unix:
        check_free("--listen", config.listen)
    stopping = stop_event()
    quiet_interpreter()
    page = None
    async with running(config) as controller:
        page = show_page(controller, config)
        address = config.listen if is_unix else f"{config.listen.rpartition(':')[0]}:{controller.port}"
        with published(config.database, address):
            announce(
                f"speclen controller serving on {address}, "
                f"database {config.database}, "
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
    if page is not None:  # after supervision has ended, which would count it as a failure
        page.server.shutdown()


def show_page(controller: Running, config: ControllerConfig) -> Any:
    """Serve the Prometheus page if one is configured. Raises OSError."""
    if not config.metrics_listen:
        return None
    # Imported here, since the library takes time to import.
    from prometheus_client import CollectorRegistry

    from speclen.controller.service.controller_metrics import ControllerCollector
    from speclen.process.servers import serve_page

    registry = CollectorRegistry()
    registry.register(ControllerCollector(controller.servicer, controller.journal, asyncio.get_running_loop()))
    page = serve_page(config.metrics_listen, registry, config)
    controller.supervisor.watch(page.thread)
    return page


async def give_up(controller: Running, error: PartFailedError) -> NoReturn:
    """Log the reason, tell the workers, and end the process, since nothing in it can be relied on."""
    log.critical("the controller ends: a part of it has failed", reason=str(error))
    with contextlib.suppress(Exception):
        await asyncio.wait_for(end(controller, 0.0), 0.6)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def quiet_interpreter() -> None:
    """Set Python up so that answers do not wait for it.

    Two threads share the interpreter: at the default switch interval of 5 ms, the store's thread could delay an answer by
    that much. The garbage collector would visit every report several times, although reports are not in cycles.
    """
    sys.setswitchinterval(0.0005)
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
