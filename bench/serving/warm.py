"""One warm worker whose policies take turns, and a controller for each policy that learns."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from speclen.bench.serving.rounds import PolicyFailedError, WorkerEndedError
from speclen.cli.profile_import import import_request, send
from speclen.cli.support.client import Client
from speclen.cli.support.database import copy_database
from speclen.cli.support.output import UserError
from speclen.cli.support.processes import Child, without_settings
from speclen.records import ContextKey
from speclen.v1 import generation_pb2, generation_pb2_grpc
from speclen.worker.config import WorkerConfig
from speclen.worker.profiling.file import read_document

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
MAX_WAITING = 100_000  # so many that none is refused: time spent waiting is part of the measurement
# Settings of a worker that a comparison may choose.
SETTINGS = ("target", "draft", "device", "dtype", "max_batch_size", "max_length", "threads", "backend")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@dataclass(slots=True)
class WarmWorker:
    """Worker and controllers for the length of a `with` block; logs and databases are deleted with it."""

    settings: WorkerConfig
    address: str = field(default_factory=free_address)
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-speclen"))
    controllers: list[Child] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    # One event loop for all requests: gRPC's event queue stays bound to the first loop that uses it.
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def __enter__(self) -> WarmWorker:
        try:
            self._start_worker()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def learn(self, policy: str, seeded: bool) -> None:
        """Start a controller for a policy and connect the worker. Raises UserError if it does not start.

        seeded: True to give the profile to the controller and start from its table.
        """
        address, log = free_address(), Path(self.folder.name) / f"{policy}.log"
        arguments = ["controller", "--listen", address, "--db", str(self._database(policy))]
        controller = Child("controller", arguments, address, log, takes_settings=False)
        self.controllers.append(controller)
        controller.start()
        controller.wait_until_serving(START_TIMEOUT_S)
        if (
            seeded and self.settings.profile is not None
        ):  # imported for this context, even if it was measured in another
            known = self.model_info().context
            context = ContextKey(known.target, known.draft, known.device, known.dtype, known.engine_fingerprint)
            send(import_request(read_document(self.settings.profile).profile, context), address, Client())
        self._tell(do="learn", policy=policy, controller=address, seeded=seeded)

    def use(self, policy: str) -> None:
        """Wait until the worker is idle and switch it to this policy; cached prompts are dropped.

        Raises PolicyFailedError if the policy cannot serve, WorkerEndedError if none can.
        """
        self._tell(do="use", policy=policy)

    def keep_reports(self, policy: str, target: Path) -> None:
        """Copy the database of a policy that learns. Raises UserError if it cannot be written."""
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_database(self._database(policy), target)

    def model_info(self) -> generation_pb2.GetModelInfoResponse:
        """This worker's models, with their context key."""
        with grpc.insecure_channel(self.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            info: generation_pb2.GetModelInfoResponse = stub.GetModelInfo(
                generation_pb2.GetModelInfoRequest(), timeout=10.0
            )
            return info

    def stop(self) -> None:
        for controller in self.controllers:
            controller.stop(STOP_TIMEOUT_S)
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
        self.runner.close()
        self.folder.cleanup()

    def _database(self, policy: str) -> Path:
        return Path(self.folder.name) / f"{policy}.db"

    @property
    def _log(self) -> Path:
        return Path(self.folder.name) / "worker.log"

    def last_line(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def _start_worker(self) -> None:
        config = {name: getattr(self.settings, name) for name in SETTINGS}
        profile = self.settings.profile and str(self.settings.profile.resolve())
        config |= {"listen": self.address, "max_waiting": MAX_WAITING, "profile": profile}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "speclen.bench.serving.switch", json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=without_settings(os.environ),
                start_new_session=True,
            )
        with grpc.insecure_channel(self.address) as channel:
            ready = grpc.channel_ready_future(channel)
            for _ in range(int(START_TIMEOUT_S)):
                try:
                    ready.result(timeout=1.0)
                    return
                except grpc.FutureTimeoutError:
                    if self.process.poll() is not None:
                        break
        raise UserError(f"the worker did not start: {self.last_line()}")

    def _tell(self, **command: Any) -> None:
        """Send one command. Raises PolicyFailedError with the worker's answer if it fails, or WorkerEndedError."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise WorkerEndedError(self.last_line())
        if not (found := json.loads(answer))["ok"]:
            raise PolicyFailedError(found["error"])
