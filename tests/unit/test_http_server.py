"""The HTTP server's listening socket while the process runs out of files, and a stream while its request waits."""

import asyncio
import errno
import os
import resource
import socket
from typing import Any

import pytest
from structlog.testing import capture_logs

from speclen.worker.http.answers import Answer
from speclen.worker.http.http_server import Listener, num_files
from speclen.worker.http.responses import DONE, STILL_HERE, JobResponse
from speclen.worker.http.schema import CompletionRequest
from speclen.worker.http.translate import completion_job
from tests.support import tiny_models
from tests.support.served import held, served
from tests.support.waiting import on_loop_until as until


@pytest.fixture
def listener():
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.settimeout(5)
        yield listener


@pytest.fixture
def _few_files():
    """So many that the next one is among the spare ones."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 8, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_files")
def test_connections_are_closed_while_only_spare_files_are_left(listener):
    with capture_logs() as logs:
        for _ in range(3):
            with socket.create_connection(listener.getsockname(), timeout=5) as client:
                with pytest.raises(ConnectionAbortedError):
                    listener.accept()
                assert client.recv(1) == b""
    (line,) = logs
    assert (line["log_level"], line["limit"]) == ("warning", num_files())


def test_without_any_file_one_error_is_raised_and_then_nothing_is_accepted(listener, monkeypatch):
    """Asyncio logs every error, with a traceback, and tries as many times as connections may wait."""

    def fail(_: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", fail)
    with pytest.raises(OSError, match="Too many open files"):
        listener.accept()
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            listener.accept()


async def test_a_waiting_stream_sends_comments(monkeypatch):
    monkeypatch.setattr("speclen.worker.http.responses.SILENCE_S", 0.01)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    body = CompletionRequest(prompt=[1, 2], max_tokens=2, stream=True)
    async with served() as at:

        async def make_answer() -> Answer:
            return Answer(await completion_job(body, at.async_engine, "c"), "tiny", tiny_models.tokenizer())

        with held(at.engine) as go_on:
            answering = asyncio.create_task(
                JobResponse(body, at.async_engine, "c", make_answer)({"type": "http"}, receive, send)
            )
            await until(lambda: sent.count(STILL_HERE) >= 2)
            go_on.set()
            await answering
    events = [one for one in sent if one not in (b"", STILL_HERE)]
    assert events[-1] == DONE
    assert b'"finish_reason":"length"' in events[-2]
    assert sent.index(STILL_HERE) < sent.index(events[0])
