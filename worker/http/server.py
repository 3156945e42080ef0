"""The HTTP server on the worker's event loop: sockets, TLS, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from speclen.transport.address import split_address
from speclen.transport.credentials import ServerSecurity, read_token
from speclen.worker.http.connection import BoundedConnection
from speclen.worker.http.guard import BODY_TIMEOUT_S, Guard

MAX_CONNECTIONS = 4096  # one more is answered 503
GRACE_S = 1  # that connections have when the server stops
BACKLOG = 2048
KEEP_ALIVE_S = 65  # of idle connections: longer than clients and proxies keep theirs, or they would meet closed ones


class HttpServer(uvicorn.Server):
    """Leaves signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def api_key_of(security: ServerSecurity) -> str | None:
    """The key that callers must show; None when anybody may call. Raises ValueError when it cannot be read."""
    return None if security.token_file is None else read_token("--api-key-file", security.token_file)


def listen(address: str) -> socket.socket:
    """A socket bound to HOST:PORT. Raises OSError when it is taken, ValueError for no address."""
    host, port = split_address("--http-listen", address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named since asyncio switches Nagle's algorithm off only then: it would hold chunks back for 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {address}: {error.strerror}; choose another with --http-listen") from error
    return bound


def make_server(app: ASGIApp, security: ServerSecurity, body_timeout_s: float = BODY_TIMEOUT_S) -> HttpServer:
    """A server with key and certificates as configured. Raises ValueError when they cannot be read."""
    config = uvicorn.Config(
        Guard(app, api_key_of(security), body_timeout_s),
        loop="none",
        http=BoundedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
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
async def serving(server: HttpServer, bound: socket.socket) -> AsyncIterator[None]:
    """Serve for the length of the block."""
    allow_many_files()
    task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if task.done():
        task.result()
    try:
        yield
    finally:
        server.should_exit = True
        await task


def allow_many_files() -> None:
    """Every connection is a file, and the usual soft limit of 1,024 is less than may come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 1024 if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS + 1024)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
