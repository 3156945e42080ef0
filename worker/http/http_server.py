"""The HTTP server on the worker's event loop: sockets, TLS, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import resource
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from speclen.process.credentials import ServerSecurity
from speclen.process.logs import Sparse
from speclen.process.settings import bind
from speclen.worker.config import KEY_FLAG, WorkerConfig
from speclen.worker.frontend.async_engine import FAILURE_GRACE_S, AsyncEngine
from speclen.worker.http.app import create_app, front_of
from speclen.worker.http.guard import BoundedConnection, Guard, allow_origins

log = structlog.get_logger()

MAX_CONNECTIONS = 4096  # one more is answered 503
GRACE_S = 1.0  # that connections have when the server stops, if the worker has not failed
UNREAD_GRACE_S = 1.0  # between the end of an unread request and that of its connection
BACKLOG = 2048  # connections that wait in the kernel
ACCEPTED_AT_ONCE = 64  # before the event loop does anything else
SPARE_FILES = 32
KEEP_ALIVE_S = 65  # of idle connections: longer than clients and proxies keep theirs, or they would meet closed ones


@contextlib.asynccontextmanager
async def http_front(
    config: WorkerConfig, engine: AsyncEngine, page: CollectorRegistry, on_failure: Callable[[BaseException], None]
) -> AsyncIterator[str]:
    """Serve for the duration of the block. Yields one line about the server.

    page: of /metrics. on_failure: called if it ends before the block. Raises as `WorkerConfig.check_http`.
    """
    app = create_app(front_of(config, engine, page))
    bound = bind("--http-listen", config.http_listen)
    security, refuse = config.http_security(), engine.metrics.refuse
    server = make_server(app, security, config.unread_timeout_s, refuse, config.http_origins())
    scheme, host = "https" if config.tls_cert else "http", config.http_listen.rpartition(":")[0]
    port = bound.getsockname()[1]
    async with serving(server, bound, on_failure):
        yield f"worker serving {scheme}://{host}:{port}/v1"


class Listener(socket.socket):
    """A listening socket that closes new connections while few file descriptors are left, which the process needs itself."""

    _sparse = Sparse(interval_s=60.0)
    _failed_at = -math.inf

    def listen(self, backlog: int = 0) -> None:
        """Let many connections wait in the kernel. backlog: ignored, since asyncio also accepts that many at once."""
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError for a connection that was closed."""
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            last, self._failed_at = self._failed_at, time.monotonic()
            if self._failed_at - last < 1.0:  # asyncio logs each error, and waits for a second after one of them
                raise BlockingIOError from None
            raise
        # The kernel gives the lowest number that is free.
        limit = num_files()
        if connection.fileno() < limit - spare_files(limit):
            return connection, address
        connection.close()
        if (left_out := self._sparse.pass_on("files")) is not None:
            advice = "raise the limit with `ulimit -n` or LimitNOFILE"
            log.warning(
                "connections are closed: few files are left", limit=limit, advice=advice, unlogged_before=left_out
            )
        raise ConnectionAbortedError


def num_files() -> int:
    """Number of files that the process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def spare_files(limit: int) -> int:
    """Number of files that HTTP connections leave to the rest of the process, if the limit allows."""
    return min(SPARE_FILES, limit // 4)


class HttpServer(uvicorn.Server):
    """A server that leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: ASGIApp,
    security: ServerSecurity,
    unread_timeout_s: float,
    refuse: Callable[[Exception], None],
    origins: Sequence[str] = (),
) -> HttpServer:
    """A server with the configured key and certificates. Raises ValueError if they cannot be read.

    refuse: called with the error of every request that the guard refuses. origins: see `allow_origins`.
    """
    longest_s = unread_timeout_s + UNREAD_GRACE_S
    most = num_files() - 3 * spare_files(
        num_files()
    )  # others have files, too, and a 503 says more than a closed connection

    class Connection(BoundedConnection):
        unread_timeout_s = longest_s

    config = uvicorn.Config(
        allow_origins(Guard(app, security.keyring(KEY_FLAG), refuse), origins),
        loop="none",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=min(MAX_CONNECTIONS, most),
        backlog=ACCEPTED_AT_ONCE,
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
    """Serve for the duration of the block, and take ownership of the socket. on_failure: called if serving ends early."""
    listener = Listener(bound.family, bound.type, bound.proto, bound.detach())
    task = asyncio.create_task(server.serve(sockets=[listener]))
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
