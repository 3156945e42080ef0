"""A page for Prometheus, served from threads of its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from threading import Thread
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from speclen.transport.address import split_address
from speclen.transport.credentials import ServerSecurity

log = structlog.get_logger()

FLAG = "--metrics-listen"
SILENCE_S = 10.0  # a reader that says nothing for so long is let go


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A page that is served. address: with the real port."""

    address: str
    server: Any
    thread: Thread


def serve_page(address: str, registry: CollectorRegistry, security: ServerSecurity) -> MetricsPage:
    """Serve the page on HOST:PORT. Raises OSError when it cannot be used, ValueError for no address."""
    host, port = split_address(FLAG, address)
    tls = security.of_pages()
    try:
        server, thread = start_http_server(port, addr=host, registry=registry, **tls)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}; choose another with {FLAG}") from error
    let_nobody_wait(server)
    thread.name = "the metrics page"
    return MetricsPage(f"{'https' if tls else 'http'}://{host}:{server.server_port}/metrics", server, thread)


def let_nobody_wait(server: Any) -> None:
    """Have each reader's own thread wait for it, and not for ever.

    The library shakes hands in the thread that accepts: a connection that says nothing would hold up all others, and
    the end of the process.
    """
    if hasattr(server.socket, "do_handshake_on_connect"):  # with TLS; then the first read does it
        server.socket.do_handshake_on_connect = False
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENCE_S})
    server.handle_error = tell_error


def tell_error(request: object, client_address: object) -> None:
    """Ignore broken connections and failed TLS handshakes."""
    error = sys.exception()
    if not isinstance(error, OSError):
        log.error("the metrics page cannot be shown", client=client_address, exc_info=error)
