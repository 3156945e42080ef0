"""A controller and a worker for one policy: started fresh, so that nothing is left of what was before."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import grpc

from speclen.bench.profile.document import read_document
from speclen.bench.profile.importing import send
from speclen.cli.support.client import Client
from speclen.cli.support.processes import Child
from speclen.records import ContextKey
from speclen.v1 import generation_pb2, generation_pb2_grpc

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy on processes of its own.

    policy: the worker's --policy. profile: what the worker starts from. seeded: the controller gets that profile, too.
    """

    policy: str
    profile: Path | None = None
    seeded: bool = False

    @property
    def learns(self) -> bool:
        return self.policy == "adaptive"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker that is measured is started."""

    target: str
    draft: str
    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: int = 16
    max_length: int = 8
    threads: int = 0
    backend: str = "auto"
    max_cached_tokens: int | None = None  # None: a worker's default

    def arguments(self) -> list[str]:
        return [
            *("--target", self.target, "--draft", self.draft, "--device", self.device, "--dtype", self.dtype),
            *("--max-batch-size", str(self.max_batch_size), "--max-length", str(self.max_length)),
            # A track may burst far above capacity; what waits is part of the measurement, what is refused is not.
            *("--threads", str(self.threads), "--backend", self.backend, "--max-waiting", "100000"),
            *(() if self.max_cached_tokens is None else ("--max-cached-tokens", str(self.max_cached_tokens))),
        ]

    def as_config(self) -> dict[str, str | int]:
        """The same as settings of a worker's configuration."""
        known = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return known | {"max_waiting": 100_000}


@dataclass(slots=True)
class Deployment:
    """One controller and one worker for the length of a `with` block; logs and database go with it."""

    contender: Contender
    settings: WorkerSettings
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-speclen"))
    children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Deployment:
        try:
            controller = self._start_controller()
            self._start_worker(controller)
            if self.contender.seeded:
                assert self.contender.profile is not None
                seed_controller(controller, self.worker.address, self.contender.profile)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def worker(self) -> Child:
        return self.children[-1]

    def stop(self) -> None:
        for child in reversed(self.children):
            child.stop(STOP_TIMEOUT_S)
        self.folder.cleanup()

    def _start_controller(self) -> str:
        address = free_address()
        arguments = ["controller", "--listen", address, "--data-dir", self.folder.name]
        self._start(Child("controller", arguments, address, Path(self.folder.name) / "controller.log"))
        return address

    def _start_worker(self, controller: str) -> None:
        address = free_address()
        arguments = ["worker", "--listen", address, "--controller", controller, "--policy", self.contender.policy]
        if self.contender.profile is not None:
            arguments += ["--profile", str(self.contender.profile)]
        log_file = Path(self.folder.name) / "worker.log"
        self._start(Child("worker", [*arguments, *self.settings.arguments()], address, log_file))

    def _start(self, child: Child) -> None:
        child.takes_settings = False
        self.children.append(child)
        child.start()
        child.wait_until_serving(START_TIMEOUT_S)


def seed_controller(controller: str, worker: str, profile: Path) -> None:
    """Give the worker's context the profile. One measured in another context is only a starting point.

    Raises UserError when the file is no profile or the controller refuses it.
    """
    document = read_document(profile)
    with grpc.insecure_channel(worker) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        known = stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10.0).context
    context = ContextKey(known.target, known.draft, known.device, known.dtype, known.engine_fingerprint)
    send(document.to_request(context, as_prior=document.context != context), controller, Client())


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start_burner() -> subprocess.Popen[bytes]:
    """A process that keeps one core busy until it is killed."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
