"""One controller process, from the database to SERVING to the last commit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import structlog

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import SERVICE, Running, create, open_store
from speclen.store.connection import StoreError
from speclen.store.database import Store
from speclen.transport.address import check_free
from speclen.transport.embedded import published
from speclen.transport.health import NOT_SERVING, SERVING, Health
from speclen.transport.servers import probed, set_health
from speclen.transport.supervision import LOOK_INTERVAL_S, PartFailedError, stop_event

log = structlog.get_logger()

# The store's health under a name of its own: with a full disk the controller goes on serving, and says so here.
STORE_SERVICE = "speclen.store"


@contextlib.asynccontextmanager
async def running(config: ControllerConfig) -> AsyncIterator[Running]:
    """A controller that serves until the block ends, and then drains. Raises ValueError, OSError with one sentence.

    OSError also at the end, where what was learned last is not in the database.
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
    """Start the work beside the calls."""
    learner, streams, supervisor = controller.servicer.learner, controller.servicer.streams, controller.supervisor
    supervisor.start("learning", learner.run())
    supervisor.start("the journal", controller.journal.run(learner.learn_all))
    supervisor.start("the sweep of streams", streams.sweep())
    supervisor.start("the delivery of updates", streams.deliver())
    supervisor.start("the database", watch_store(store, controller.health))


async def end(controller: Running, timeout_s: float) -> None:
    """Drain; where something has failed, only tell: what would be saved could be wrong."""
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
    await controller.server.stop(grace=1.0)  # no longer than calls take to end: each is to hear why


async def save(controller: Running, timeout_s: float) -> None:
    """Learn what waits and commit it; `unstored` says what became of it."""
    await controller.servicer.learner.learn_all()
    with contextlib.suppress(StoreError):  # the store has ended
        if not await controller.journal.finish(timeout_s):
            log.error("the disk did not take the last commit in time", timeout_s=timeout_s)


def unstored(controller: Running, store: Store) -> str:
    """Why what a controller that has ended learned last is not on the disk; "" if it is. store: closed."""
    failure, health = controller.supervisor.failure, store.health()
    if failure.done():
        return str(failure.result())
    if not health.alive:
        return health.detail
    return "; ".join(dict.fromkeys(map(str, controller.journal.given_up.values())))


async def watch_store(store: Store, health_servicer: Health) -> None:
    """Keep the store's health, and the log, up to date for ever. Raises PartFailedError when the store has ended."""
    was_ok, num_lost = None, 0
    while True:
        state = store.health()
        if not state.alive:
            await health_servicer.set(STORE_SERVICE, NOT_SERVING)
            raise PartFailedError(state.detail)
        if state.ok != was_ok:
            await health_servicer.set(STORE_SERVICE, SERVING if state.ok else NOT_SERVING)
            if not state.ok:
                log.error(
                    "the database does not take all that it is given, learning goes on in memory", detail=state.detail
                )
            elif was_ok is not None:
                log.info("the database takes all that it is given again")
        was_ok = state.ok
        if (lost := state.num_rows_refused) > num_lost:
            log.error("the database refused rows, its table store_events says why", num=lost - num_lost)
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
        page = show_page(controller, config)
        address = f"{config.listen.rpartition(':')[0]}:{controller.port}"
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
    if page is not None:  # after the end of supervision, which would take it for a failure
        page.server.shutdown()


def show_page(controller: Running, config: ControllerConfig) -> Any:
    """The Prometheus page, if one is wanted. Raises OSError."""
    if not config.metrics_listen:
        return None
    # Only then: the library takes time to import.
    from prometheus_client import CollectorRegistry

    from speclen.controller.service.metrics import ControllerCollector
    from speclen.transport.pages import serve_page

    registry = CollectorRegistry()
    registry.register(ControllerCollector(controller.servicer, controller.journal, asyncio.get_running_loop()))
    page = serve_page(config.metrics_listen, registry, config)
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
