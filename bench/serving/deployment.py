"""Controller and worker processes for one run of one policy: started fresh, so that nothing is left of the run before."""

from __future__ import annotations

import os
import re
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
from speclen.console.client import Client
from speclen.console.errors import UserError
from speclen.console.processes import Child
from speclen.controller.estimator.core import ContextKey
from speclen.v1 import generation_pb2, generation_pb2_grpc

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
LOCAL = "@local"


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy that takes part in a comparison.

    name: as it was asked for. policy: the worker's --policy. profile: what the worker starts from. seeded: the
    controller gets that profile, too. local: there is no controller, and nothing is reported.
    """

    name: str
    policy: str
    profile: Path | None = None
    seeded: bool = False
    local: bool = False

    @property
    def learns(self) -> bool:
        return self.policy == "adaptive"


def parse_contenders(text: str, max_length: int, profile: Path | None, oracle: Path | None) -> list[Contender]:
    """The contenders of "adaptive,profile,none,fixed:1-8,oracle,fixed:2@local". Raises UserError naming a wrong one."""
    names = [expanded for name in text.split(",") if name.strip() for expanded in expand(name.strip())]
    if not names:
        raise UserError("--compare names no policy: use for example adaptive,none,fixed:3")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--compare names {repeated} twice")
    return [_contender(name, max_length, profile, oracle) for name in names]


def expand(name: str) -> list[str]:
    """ "fixed:1-3" is fixed:1, fixed:2 and fixed:3; everything else is itself."""
    match = re.fullmatch(r"fixed:(\d{1,2})-(\d{1,2})", name)
    return [f"fixed:{length}" for length in range(int(match[1]), int(match[2]) + 1)] if match else [name]


def _contender(name: str, max_length: int, profile: Path | None, oracle: Path | None) -> Contender:
    policy, local = name.removesuffix(LOCAL), name.endswith(LOCAL)
    if policy == "adaptive" and not local:
        return Contender(name, policy, profile, seeded=profile is not None)
    if policy == "profile":
        if profile is None:
            raise UserError("--compare profile needs --profile FILE: make one with `speclen profile run`")
        return Contender(name, policy, profile, local=local)
    if policy == "oracle":
        return Contender(name, "profile", oracle, local=local)
    kind, _, number = policy.partition(":")
    if policy == "none" or (kind == "fixed" and number.isdecimal() and int(number) <= max_length):
        return Contender(name, policy, local=local)
    raise UserError(
        f"--compare {name!r} is unknown: use adaptive, profile, none, oracle or fixed:0 to fixed:{max_length}; "
        f"{LOCAL} behind one of the last four runs it without a controller"
    )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How every worker of a comparison is started."""

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


@dataclass(slots=True)
class Deployment:
    """One controller and one worker for the length of a `with` block; logs and database go with it."""

    contender: Contender
    settings: WorkerSettings
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-speclen"))
    children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Deployment:
        try:
            controller = "" if self.contender.local else self._start_controller()
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

    def model_info(self) -> generation_pb2.GetModelInfoResponse:
        with grpc.insecure_channel(self.worker.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            return stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10.0)

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time that each process has used so far; empty where the system does not tell."""
        return {child.name: used for child in self.children if (used := cpu_seconds_of(child)) is not None}

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


def cpu_seconds_of(child: Child) -> float | None:
    if child.process is None:
        return None
    try:
        fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def start_burner() -> subprocess.Popen[bytes]:
    """A process that keeps one core busy until it is killed."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
