"""The HTTP server on the worker's event loop: sockets, TLS, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from speclen.transport.address import bind
from speclen.transport.credentials import ServerSecurity
from speclen.worker.config import KEY_FLAG, WorkerConfig
from speclen.worker.http.app import create_app, front_of
from speclen.worker.http.connection import BoundedConnection
from speclen.worker.http.guard import Guard
from speclen.worker.service.async_engine import FAILURE_GRACE_S, AsyncEngine

MAX_CONNECTIONS = 4096  # one more is answered 503
GRACE_S = 1.0  # that connections have when the server stops, if the worker has not failed
UNREAD_GRACE_S = 1.0  # between the end of an unread request and that of its connection
BACKLOG = 2048
KEEP_ALIVE_S = 65  # of idle connections: longer than clients and proxies keep theirs, or they would meet closed ones


@contextlib.asynccontextmanager
async def http_front(
    config: WorkerConfig, engine: AsyncEngine, page: CollectorRegistry, on_failure: Callable[[BaseException], None]
) -> AsyncIterator[str]:
    """Serve for the length of the block; the value: one line about it.

    page: of /metrics. on_failure: called if it ends before the block. Raises as `WorkerConfig.check_http`.
    """
    app = create_app(front_of(config, engine, page))
    bound = bind("--http-listen", config.http_listen)
    security, refuse = config.http_security(), engine.metrics.refuse
    server = make_server(app, security, config.unread_timeout_s, refuse)
    async with serving(server, bound, on_failure):
        scheme, host = "https" if config.tls_cert else "http", config.http_listen.rpartition(":")[0]
        yield f"worker serving {scheme}://{host}:{bound.getsockname()[1]}/v1"


class HttpServer(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: ASGIApp, security: ServerSecurity, unread_timeout_s: float, refuse: Callable[[Exception], None]
) -> HttpServer:
    """A server with key and certificates as configured. Raises ValueError when they cannot be read.

    refuse: called with the error of every request that the guard refuses.
    """
    longest_s = unread_timeout_s + UNREAD_GRACE_S

    class Connection(BoundedConnection):
        unread_timeout_s = longest_s

    config = uvicorn.Config(
        Guard(app, security.keyring(KEY_FLAG), refuse),
        loop="none",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,  # longer than ours
        ssl_certfile=security.tls_cert,
        ssl_keyfile=security.tls_key,
        ssl_ca_certs=None if security.tls_client_ca is None else str(security.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if security.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"--tls-cert {security.tls_cert} and its key cannot be used: {error}") from error
    return HttpServer(config)


@contextlib.asynccontextmanager
async def serving(
    server: HttpServer, bound: socket.socket, on_failure: Callable[[BaseException], None] = lambda error: None
) -> AsyncIterator[None]:
    """Serve for the length of the block. on_failure: called if serving ends before."""
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if task.done():
        task.result()

    def ended(task: asyncio.Task[None]) -> None:
        if not server.should_exit:
            on_failure(task.exception() or RuntimeError("it returned"))

    task.add_done_callback(ended)
    grace_s = GRACE_S
    try:
        yield
    except BaseException:
        grace_s = FAILURE_GRACE_S
        raise
    finally:
        server.should_exit = True
        if not (await asyncio.wait([task], timeout=grace_s))[0]:
            for connection in list(server.server_state.connections):
                connection.transport.abort()  # ends its request; uvicorn would cancel it and log a traceback
        await task
