"""Servers of a process: a gRPC service with health and reflection, health alone, and the metrics page.

Health alone, on an address of its own, is for orchestrators whose probes support neither TLS nor tokens. It reveals only
whether the server serves, which a port scan would show as well. The metrics page, for Prometheus, is served from its own
threads, and its metric families are built at each scrape.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any

import structlog
from grpc import aio
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from speclen.process.credentials import ServerSecurity
from speclen.process.health import Health
from speclen.process.settings import check_free, split_address

log = structlog.get_logger()

METRICS_FLAG = "--metrics-listen"
SILENCE_S = 10.0  # a reader that sends nothing for this long is disconnected
Values = Mapping[Any, float]  # by the labels' values, a tuple
# Options of every server. Clients may ping as often as they like, with and without a call: by default gRPC disconnects
# clients that ping every ten seconds. Under load pings arrive in bursts, so no limit on them is safe.
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a taken port is an error; by default it would be shared silently
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]
MOST_CALLS = 16  # concurrent health probes; further ones are refused
MOST_FILES = 10_240  # open files of a process: thousands of gRPC connections and as many over HTTP


@cache
def prepare_aio() -> None:
    """Keep gRPC's poller thread alive until the process exits. Call this before creating anything of grpc.aio.

    When the last object of grpc.aio is destroyed, gRPC stops its poller and joins it. The poller wakes the event loop with
    one byte per event through a socket pair. Under load some 280 bytes fill the pair, and the poller blocks until the loop
    reads them. If the loop has ended by then, nothing reads, and the process hangs at exit. One more reference keeps the
    poller running; it is a daemon thread and dies with the process.

    Do not make the socket pair non-blocking instead: all events then get through at once, and with 2,000 busy streams
    gRPC's server cancels some of them.
    """
    aio.init_grpc_aio()  # type: ignore[attr-defined]  # left out of the published types


async def create_server(
    address: str,
    service: str,
    add_service: Callable[[aio.Server], None],
    security: ServerSecurity,
    options: Sequence[tuple[str, Any]],
    most_calls: int | None = None,
) -> tuple[aio.Server, int, Health]:
    """Create, but do not start, a server with a service, health and reflection. Returns it with its port and its health.

    Raises OSError if the address cannot be bound, ValueError if certificates or tokens cannot be read.
    """
    prepare_aio()
    allow_many_files()
    interceptors = security.interceptors()
    server = aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=most_calls)
    add_service(server)
    health = Health()
    health.add_to(server)
    enable_reflection(server, service)
    return server, security.add_port(server, address), health


def enable_reflection(server: aio.Server, service: str) -> None:
    """Add gRPC server reflection if `speclen[reflection]` is installed."""
    try:
        from grpc_health.v1 import health  # with the description of that service
        from grpc_reflection.v1alpha import reflection
    except ModuleNotFoundError:
        return
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def allow_many_files() -> None:
    """Raise the soft limit of open files, usually 1,024: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def set_health(health: Health, service: str, status: int) -> None:
    """Set the health of a server and of its service."""
    for name in ("", service):
        await health.set(name, status)


@asynccontextmanager
async def probed(address: str, health: Health) -> AsyncIterator[int]:
    """Serve health alone at an address while the block runs, and yield the port; with the address "", serve nothing.

    Raises ValueError or OSError with one sentence if the address cannot be used.
    """
    if not address:
        yield 0
        return
    check_free("--probe-listen", address)
    server = aio.server(maximum_concurrent_rpcs=MOST_CALLS, options=SERVER_OPTIONS)
    health.add_to(
        server, watched=False
    )  # some calls of Watch, which anybody may make here, would leave no room for probes
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


class Families:
    """Builds metric families whose names begin with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(f"{self._prefix}_{name}", text, value=value)

    def gauges(self, name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
        return _filled(GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=labels), values)

    def counters(self, name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
        return _filled(CounterMetricFamily(f"{self._prefix}_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A running metrics page. address: with the real port if 0 was asked for."""

    address: str
    server: Any
    thread: Thread


def serve_page(address: str, registry: CollectorRegistry, security: ServerSecurity) -> MetricsPage:
    """Serve the page on HOST:PORT. Raises OSError if the port cannot be bound, ValueError if the address is malformed."""
    host, port = split_address(METRICS_FLAG, address)
    files = {"certfile": security.tls_cert, "keyfile": security.tls_key, "client_cafile": security.tls_client_ca}
    tls: dict[str, Any] = {name: str(path) for name, path in files.items() if path is not None}
    try:
        server, thread = start_http_server(
            port, addr=host, registry=registry, client_auth_required="client_cafile" in tls, **tls
        )
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}; choose another with {METRICS_FLAG}") from error
    bound_readers(server)
    thread.name = "the metrics page"
    return MetricsPage(f"{'https' if tls else 'http'}://{host}:{server.server_port}/metrics", server, thread)


def bound_readers(server: Any) -> None:
    """Complete each TLS handshake in the reader's own thread, with a timeout.

    The library would complete it in the thread that accepts connections. A silent connection would then block all others,
    and the exit of the process.
    """
    if hasattr(server.socket, "do_handshake_on_connect"):  # with TLS; without it the first read does the handshake
        server.socket.do_handshake_on_connect = False
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SILENCE_S})
    server.handle_error = log_error


def log_error(request: object, client_address: object) -> None:
    """Log an unexpected error of a request. Broken connections and failed TLS handshakes are ignored."""
    error = sys.exception()
    if not isinstance(error, OSError):
        log.error("the metrics page cannot be served", client=client_address, exc_info=error)
