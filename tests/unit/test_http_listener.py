"""The listening socket of the HTTP front while the process runs out of files."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from speclen.worker.http.server import Listener, num_files, spare_files


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        listener.settimeout(5)
        yield listener


@pytest.fixture
def _few_files() -> Iterator[None]:
    """So many that the next one is among the spare ones."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 8, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_files")
def test_connections_are_closed_while_only_spare_files_are_left(listener: Listener) -> None:
    with capture_logs() as logs:
        for _ in range(3):
            with socket.create_connection(listener.getsockname(), timeout=5) as client:
                with pytest.raises(ConnectionAbortedError):
                    listener.accept()
                assert client.recv(1) == b""
    (line,) = logs
    assert (line["log_level"], line["limit"]) == ("warning", num_files())


def test_connections_are_taken_while_there_are_files(listener: Listener) -> None:
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        accepted, address = listener.accept()
        with accepted:
            assert address == client.getsockname()


def test_without_any_file_one_error_is_raised_and_then_nothing_is_accepted(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asyncio logs every error, with a traceback, and tries as many times as connections may wait."""

    def fail(_: socket.socket) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", fail)
    with pytest.raises(OSError, match="Too many open files"):
        listener.accept()
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(("limit", "spare"), [(64, 16), (256, 32), (1024, 32), (2**20, 32)])
def test_some_files_are_reserved_for_everything_but_connections(limit: int, spare: int) -> None:
    assert spare_files(limit) == spare
