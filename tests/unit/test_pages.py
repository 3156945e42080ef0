"""The page for Prometheus is read whoever else is connected, and its end waits for nobody."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

import speclen.transport.pages
from speclen.transport.credentials import ServerSecurity
from speclen.transport.pages import serve_page
from tests.support.certificates import make_certificates


@pytest.fixture(params=["http", "https"])
def security(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ServerSecurity, ssl.SSLContext | None]:
    if request.param == "http":
        return ServerSecurity(), None
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=made.authority.cert)
    return ServerSecurity(made.server.cert, made.server.key), context


@contextlib.contextmanager
def silent_connections(address: str, number: int = 3) -> Iterator[list[socket.socket]]:
    """Connections on which nobody says a word."""
    host, port = address.split("/")[2].rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(number)]


def test_silent_connections_hold_up_neither_readers_nor_the_end(security, monkeypatch, capfd) -> None:
    """Story: with TLS, one silent connection blocked the page, and ending the process took until its client went."""
    monkeypatch.setattr(speclen.transport.pages, "SILENCE_S", 0.5)
    how, context = security
    registry = CollectorRegistry()
    Gauge("answer", "To everything", registry=registry).set(42)
    page = serve_page("127.0.0.1:0", registry, how)
    with silent_connections(page.address) as silent:
        read = urllib.request.urlopen(page.address, context=context, timeout=20).read().decode()
        assert "answer 42.0" in read
        for one in silent:  # each is let go after a while
            one.settimeout(20)
            assert one.recv(100) == b""
    with silent_connections(page.address):
        started = time.monotonic()
        page.server.shutdown()
        page.thread.join(20)
        assert not page.thread.is_alive()
        assert time.monotonic() - started < 15
    assert capfd.readouterr().err == ""
