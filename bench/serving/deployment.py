"""Settings of a worker that is measured, and the start of its controller."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import grpc

from speclen.cli.profile.document import read_document
from speclen.cli.profile.importing import send
from speclen.cli.support.client import Client
from speclen.records import ContextKey
from speclen.v1 import generation_pb2, generation_pb2_grpc

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of the worker under test."""

    target: str
    draft: str
    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: int = 16
    max_length: int = 8
    threads: int = 0
    backend: str = "auto"

    def as_config(self) -> dict[str, str | int]:
        """The same as settings of a worker's configuration. Requests that wait are measured, and none is refused."""
        return {name: getattr(self, name) for name in self.__slots__} | {"max_waiting": 100_000}


def seed_controller(controller: str, worker: str, profile: Path) -> None:
    """Give the worker's context the profile. One measured in another context is only a starting point.

    Raises UserError when the file is no profile or the controller refuses it.
    """
    document = read_document(profile)
    with grpc.insecure_channel(worker) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        known = stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10.0).context
    context = ContextKey(known.target, known.draft, known.device, known.dtype, known.engine_fingerprint)
    send(document.to_request(context), controller, Client())


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
