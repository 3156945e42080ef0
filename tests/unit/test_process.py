"""Servers listen on loopback by default; beyond it every method needs TLS and a token; idle connections block no page."""

import asyncio
import contextlib
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Gauge

import speclen.process.servers
from speclen.process.credentials import ClientSecurity, Keyring, ServerSecurity, read_token, read_tokens
from speclen.process.servers import serve_page
from speclen.process.settings import split_address
from tests.support.certificates import make_certificates
from tests.support.waiting import PATIENCE_S

TOKEN = "0123456789abcdef"
FILE = Path("named")


@pytest.mark.parametrize("address", ["7080", ":7080", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999", "::1:80", ""])
def test_an_invalid_address_is_named(address):
    with pytest.raises(ValueError, match="--listen"):
        split_address("--listen", address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"])
def test_a_loopback_address_needs_no_protection(address):
    ServerSecurity().check_exposure("--listen", address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "example.org:1"])
@pytest.mark.parametrize("given", [{}, {"tls_cert": FILE, "tls_key": FILE}, {"token_file": FILE}])
def test_other_addresses_need_both_encryption_and_authentication(address, given):
    with pytest.raises(ValueError, match="open to other machines"):
        ServerSecurity(**given).check_exposure("--listen", address)
    ServerSecurity(tls_cert=FILE, tls_key=FILE, token_file=FILE).check_exposure("--listen", address)
    ServerSecurity(tls_cert=FILE, tls_key=FILE, tls_client_ca=FILE).check_exposure("--listen", address)
    ServerSecurity(**given, insecure=True).check_exposure("--listen", address)


def call_health(server_security: ServerSecurity, client_security: ClientSecurity) -> grpc.StatusCode:
    """Status of a health check, which has to be protected like every other method."""

    async def run() -> grpc.StatusCode:
        server = aio.server(interceptors=server_security.interceptors())
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server_security.add_port(server, "127.0.0.1:0")
        await server.start()
        try:
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                metadata = aio.Metadata(*client_security.metadata())
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PATIENCE_S, metadata=metadata
                )
                return grpc.StatusCode.OK
        except aio.AioRpcError as error:
            return error.code()
        finally:
            await server.stop(None)

    return asyncio.run(run())


def test_only_the_right_token_opens(tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"{TOKEN}\n")
    wrong.write_text(TOKEN[::-1])
    security = ServerSecurity(token_file=right)
    assert call_health(security, ClientSecurity(token_file=right)) == grpc.StatusCode.OK
    assert call_health(security, ClientSecurity(token_file=wrong)) == grpc.StatusCode.UNAUTHENTICATED
    assert call_health(security, ClientSecurity()) == grpc.StatusCode.UNAUTHENTICATED


def test_each_of_several_tokens_identifies_its_holder(tmp_path):
    """So a token is exchanged without a moment in which neither the old nor the new one works."""
    file = tmp_path / "tokens"
    file.write_text(f"# alice\n{TOKEN}\n\n{TOKEN[::-1]}\n")
    security, one = ServerSecurity(token_file=file), tmp_path / "one"
    for token, code in ((TOKEN, grpc.StatusCode.OK), (TOKEN[::-1], grpc.StatusCode.OK), ("# alice" * 4, None)):
        one.write_text(token)
        assert call_health(security, ClientSecurity(token_file=one)) == (code or grpc.StatusCode.UNAUTHENTICATED)
    keyring = security.keyring()
    callers = {keyring.caller(f"Bearer {token}") for token in (TOKEN, TOKEN[::-1])}
    assert len(callers) == 2
    assert "" not in callers
    assert TOKEN not in str(callers)
    assert keyring.caller("Bearer no") is None
    assert Keyring([TOKEN]).caller(f"Bearer {TOKEN}".encode()) == "", "a token shared by all identifies nobody"
    with pytest.raises(ValueError, match="one"):
        ClientSecurity(token_file=file).metadata()


@pytest.mark.parametrize(
    ("header", "right"),
    [
        (f"bearer {TOKEN}", True),
        (f"BEARER  {TOKEN}".encode(), True),
        (f"Bearer {TOKEN.upper()}", False),
        (f"Bearer{TOKEN}", False),
        (f"Basic {TOKEN}", False),
        (TOKEN, False),
        ("bearer", False),
        ("", False),
    ],
)
def test_the_scheme_is_case_insensitive_and_the_token_is_not(header, right):
    both = Keyring([TOKEN, TOKEN[::-1]])
    assert both.caller(header) == (both.caller(f"Bearer {TOKEN}") if right else None)


@pytest.mark.parametrize("content", ["", "short", "ünprintable-enough-token", "0123456789abcde\x07f"])
def test_weak_tokens_are_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(ValueError, match="openssl"):
        read_token("--token-file", path)
    with pytest.raises(ValueError, match="openssl"):
        read_tokens("--token-file", path)


def test_half_a_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="belong together"):
        ServerSecurity(tls_cert=tmp_path / "cert")
    with pytest.raises(ValueError, match="needs --tls-cert"):
        ServerSecurity(tls_client_ca=tmp_path / "ca")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with pytest.raises(ValueError, match="--read-token-file needs --token-file"):
        ServerSecurity(read_token_file=token)
    with pytest.raises(ValueError, match="--read-token-file holds a token of --token-file"):
        ServerSecurity(token_file=token, read_token_file=token).interceptors()
    with pytest.raises(ValueError, match="cannot be read"):
        ServerSecurity(tls_cert=tmp_path / "cert", tls_key=tmp_path / "key").credentials()
    with pytest.raises(ValueError, match="belong together"):
        ClientSecurity(cert=tmp_path / "cert").credentials()


@pytest.fixture(params=["http", "https"])
def security(request, tmp_path):
    if request.param == "http":
        return ServerSecurity(), None
    made = make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=made.authority.cert)
    return ServerSecurity(made.server.cert, made.server.key), context


@contextlib.contextmanager
def silent_connections(address: str, number: int = 3) -> Iterator[list[socket.socket]]:
    """Connections on which nothing is sent."""
    host, port = address.split("/")[2].rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(number)]


def test_silent_connections_delay_neither_readers_nor_shutdown(security, monkeypatch, capfd):
    """Story: with TLS, one silent connection blocked the page and the end of the process until its client disconnected."""
    monkeypatch.setattr(speclen.process.servers, "SILENCE_S", 0.5)
    how, context = security
    registry = CollectorRegistry()
    Gauge("answer", "To everything", registry=registry).set(42)
    page = serve_page("127.0.0.1:0", registry, how)
    with silent_connections(page.address) as silent:
        read = urllib.request.urlopen(page.address, context=context, timeout=PATIENCE_S).read().decode()
        assert "answer 42.0" in read
        for one in silent:  # each is let go after a while
            one.settimeout(PATIENCE_S)
            assert one.recv(100) == b""
    with silent_connections(page.address):
        page.server.shutdown()
        page.thread.join(PATIENCE_S)
        assert not page.thread.is_alive()
    assert capfd.readouterr().err == ""
