"""A page for Prometheus, served from threads of its own, and metric families that are made when it asks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from speclen.transport.address import split_address
from speclen.transport.credentials import ServerSecurity

log = structlog.get_logger()

FLAG = "--metrics-listen"
SILENCE_S = 10.0  # a reader that says nothing for so long is let go
Values = Mapping[Any, float]  # by the labels' values, a tuple


class Families:
    """Makes families. prefix: of every name."""

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
    """A page that is served. address: with the real port."""

    address: str
    server: Any
    thread: Thread


def serve_page(address: str, registry: CollectorRegistry, security: ServerSecurity) -> MetricsPage:
    """Serve the page on HOST:PORT. Raises OSError when it cannot be used, ValueError for no address."""
    host, port = split_address(FLAG, address)
    files = {"certfile": security.tls_cert, "keyfile": security.tls_key, "client_cafile": security.tls_client_ca}
    tls: dict[str, Any] = {name: str(path) for name, path in files.items() if path is not None}
    try:
        server, thread = start_http_server(
            port, addr=host, registry=registry, client_auth_required="client_cafile" in tls, **tls
        )
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
