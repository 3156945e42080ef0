"""Servers that the contract's tests share, each started once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.contract import servers
from tests.contract.servers import Server
from tests.contract.simulated import SimulatedWorker
from tests.support.world import World


@dataclass
class Shared:
    """A serving process, and the database of its controller."""

    address: str
    channel: grpc.Channel
    database: Path


@contextmanager
def serving(server: Server) -> Iterator[Shared]:
    """The server, started, until the tests have ended."""
    server.start()
    try:
        server.serving()
        with grpc.insecure_channel(server.address) as channel:
            yield Shared(server.address, channel, server.log.with_name("speclen.db"))
    finally:
        server.end()


@pytest.fixture(scope="session")
def controller(tmp_path_factory):
    """A controller for simulated workers; each test has a context of its own there."""
    with serving(servers.controller(tmp_path_factory.mktemp("stored"), "--commit-interval-s", "0.1")) as shared:
        yield shared


@pytest.fixture(scope="session")
def learned(controller):
    """A database in which a simulated worker has learned, at 1, 4 and 12 sequences a step."""
    worker = SimulatedWorker(controller.channel, "learned", "learned", World())
    for number in range(60):
        worker.play((1, 4, 12)[number % 3], 16)
    worker.stream.close()
    return controller.database


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """`speclen up`, known by its worker."""
    with serving(servers.up(tmp_path_factory.mktemp("up"))) as shared:
        yield shared
