"""Connections that send too slowly or too much, or read too slowly, are closed and leave nothing behind."""

import asyncio
import contextlib
import json
import socket
import ssl
import time

import httpx
import pytest

from speclen.process.credentials import ServerSecurity
from speclen.process.settings import bind
from speclen.worker.http import guard
from speclen.worker.http.http_server import UNREAD_GRACE_S, make_server, serving
from speclen.worker.http.responses import json_response
from tests.support.certificates import make_certificates
from tests.support.http_worker import connected, head, http_worker, post, until_idle
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def worker():
    with http_worker(max_batch_size=4, max_waiting=4) as worker:
        yield worker


def completion(content: bytes) -> bytes:
    return head("POST /v1/completions", {"Content-Type": "application/json", "Content-Length": len(content)}) + content


def until_closed(one):
    """Return when the server has closed the connection; its timeout is a failure."""
    with contextlib.suppress(ConnectionResetError):
        while one.recv(65_536):
            pass


def test_slow_headers_end_the_connection(worker, monkeypatch):
    monkeypatch.setattr(guard.BoundedConnection, "header_timeout_s", 0.5)
    with (
        connected(worker) as silent,
        connected(worker) as dripping,
        connected(worker) as second,
        connected(worker) as empty,
    ):
        for one in (second, empty):
            one.sendall(head("GET /health", {}))
            assert b" 200 " in one.recv(4096)
        dripping.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        second.sendall(b"G")
        empty.sendall(b"\r\n")  # begins no request, and took every timeout off the connection
        for one in (silent, dripping, second, empty):
            until_closed(one)


def test_endless_headers_end_the_connection(worker):
    endless = b"".join(f"x-{number}: {'y' * 100}\r\n".encode() for number in range(100_000))
    with connected(worker) as one, pytest.raises((ConnectionResetError, BrokenPipeError)):
        one.sendall(b"GET /health HTTP/1.1\r\n" + endless)


CHUNKED = {"Content-Type": "application/json", "Transfer-Encoding": "chunked", "Connection": "close"}


def test_endless_trailers_end_the_connection_and_are_not_stored(worker, monkeypatch):
    """Story: they were added to the request's headers, past the limits of headers and body."""
    monkeypatch.setattr(guard, "MAX_MESSAGE_BYTES", 2**20)
    num_headers = []

    def send_many(one):
        for _ in range(1000):
            one.sendall(b"a:\r\n" * 10_000)
            num_headers.extend(len(each.headers or ()) for each in list(worker.server.server_state.connections))

    with connected(worker) as one:
        one.sendall(head("POST /tokenize", CHUNKED) + b"0\r\n")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_many(one)
    assert max(num_headers) == 1 + len(CHUNKED)


@pytest.mark.parametrize(("stream", "end"), [(False, b"}"), (True, b"}\n\ndata: [DONE]\n\n")])
def test_an_http_1_0_client_receives_no_chunked_encoding(worker, stream, end):
    """nginx uses HTTP/1.0 for upstream servers by default."""
    asked = completion(json.dumps({"prompt": "a", "max_tokens": 9, "stream": stream}).encode())
    with connected(worker) as one:
        one.sendall(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        headers, _, body = b"".join(iter(lambda: one.recv(65_536), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    assert b"connection: close" in headers.lower()
    assert body.endswith(end)


def test_a_client_that_does_not_read_is_cut_off():
    body = {"prompt": "a", "max_tokens": 250, "n": 64, "stream": True, "logprobs": 20, "ignore_eos": True}
    content = json.dumps(body).encode()
    with http_worker(unread_timeout_s=0.5) as worker, socket.socket() as one:
        # The kernel holds megabytes for a connection otherwise.
        worker.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", int(worker.http.rpartition(":")[2])))
        one.sendall(completion(content))
        until(lambda: worker.engine.load().num_running)
        until_idle(worker.engine, 60.0)
        assert worker.engine.load().num_generated_tokens < 250 * 64
        until(lambda: not worker.server.server_state.connections)
        page = httpx.get(f"{worker.url}/metrics").text.splitlines()
        assert 'speclen_slow_readers_total{model_name="tiny"} 1.0' in page
        assert 'speclen_request_refused_total{model_name="tiny",reason="slow_reader"} 1.0' in page


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_large_answer_waits_for_a_slow_reader_and_ends_without_one(tmp_path, encrypted):
    """Story: over TLS, a client that read 256 KiB in each timeout was cut off before the first mebibyte."""
    timeout_s, skipped_s = 60.0, 0.0  # the loop's time passes as the client reads
    security, trust, name = ServerSecurity(), None, None
    if encrypted:
        made, name = make_certificates(tmp_path), "127.0.0.1"
        security = ServerSecurity(tls_cert=made.server.cert, tls_key=made.server.key)
        trust = ssl.create_default_context(cafile=str(made.authority.cert))
    body, sent = "x" * 8_000_000, []

    async def app(scope, receive, send):
        await json_response(body)(scope, receive, send)
        sent.append(True)

    bound = bind("--http-listen", "127.0.0.1:0")
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    server, address = make_server(app, security, timeout_s - UNREAD_GRACE_S, lambda error: None), bound.getsockname()

    async def asked():
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # the kernel would read megabytes ahead
        one.connect(address)
        reader, writer = await asyncio.open_connection(sock=one, ssl=trust, server_hostname=name, limit=65_536)
        writer.write(head("GET /", {"Connection": "close"}))
        await reader.readuntil(b"\r\n\r\n")
        return reader, writer

    async def serve():
        nonlocal skipped_s
        asyncio.get_running_loop().time = lambda: time.monotonic() + skipped_s
        async with serving(server, bound):
            reader, writer = await asked()
            assert not sent, "it is sent as it is read"
            num_read = 0
            while piece := await reader.read(65_536):
                num_read += len(piece)
                skipped_s += timeout_s * len(piece) / 2**18
            assert (num_read, sent) == (len(body) + 2, [True])
            _unread, writer = await asked()
            began_s = skipped_s
            while server.server_state.connections:
                assert skipped_s - began_s < 3 * timeout_s
                skipped_s += 0.1
                await asyncio.sleep(0)
            writer.transport.abort()

    asyncio.run(serve())


def test_hundreds_of_disconnects_leave_nothing_behind(worker):
    content = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    request = completion(content)
    for number in range(600):
        with connected(worker) as one:
            one.sendall(request[: len(request) - number % 3 * 40])
    # Connections are accepted in order: with this one all are, and none waits in the kernel to bring its request later.
    assert httpx.get(f"{worker.url}/health", timeout=PATIENCE_S).status_code == 200
    until(lambda: not (worker.server.server_state.connections or worker.server.server_state.tasks))
    until_idle(worker.engine)  # only now: the last connections may have brought requests that had to be ended
    until(lambda: not worker.async_engine.num_open)
    assert post(worker, {"prompt": "a", "max_tokens": 2}).status_code == 200
