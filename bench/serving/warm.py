"""One worker that stays, whose policies take turns, and a controller for each of them that learns."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from speclen.bench.serving.deployment import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    WorkerSettings,
    free_address,
    seed_controller,
)
from speclen.bench.serving.policies import Policy, in_words
from speclen.cli.support.database import copy_database
from speclen.cli.support.errors import UserError
from speclen.cli.support.processes import Child, without_settings
from speclen.v1 import control_pb2, generation_pb2, generation_pb2_grpc


@dataclass(slots=True)
class WarmWorker:
    """Worker and controllers for the length of a `with` block; logs and databases go with it.

    profile: seeds the policies that learn, but for `cold`.
    """

    settings: WorkerSettings
    profile: Path | None = None
    address: str = field(default_factory=free_address)
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=lambda: tempfile.TemporaryDirectory("-speclen"))
    controllers: dict[str, Child] = field(default_factory=dict)
    databases: dict[str, Path] = field(default_factory=dict)  # of the controllers, also of those that have ended
    process: subprocess.Popen[str] | None = None
    # One event loop for all that is asked of the worker: gRPC's queue of events stays with the loop that it met first.
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

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

    def open(self, policy: Policy) -> None:
        """Make a policy known to the worker. Raises UserError when it cannot be."""
        if policy.table is None:
            self._open_learning(policy)
        else:
            self._tell(do="table", name=policy.name, ranges=in_words(policy.table))

    def use(self, name: str) -> None:
        """Drain, and let the worker follow this policy from now on; prompts of before are forgotten."""
        self._tell(do="use", name=name)

    def close(self, name: str) -> None:
        """Forget a policy, and what it has learned."""
        self._tell(do="close", name=name)
        if name in self.controllers:
            self.controllers.pop(name).stop(STOP_TIMEOUT_S)

    def keep_reports(self, name: str, target: Path) -> None:
        """Copy the database of a policy that learns. Raises UserError when that cannot be written."""
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_database(self.databases[name], target)

    def context(self) -> control_pb2.ContextKey:
        """The key under which a controller knows this worker's models and machine."""
        with grpc.insecure_channel(self.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            return stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10.0).context

    def stop(self) -> None:
        for controller in self.controllers.values():
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

    @property
    def _log(self) -> Path:
        return Path(self.folder.name) / "worker.log"

    def last_line(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def _start_worker(self) -> None:
        config = {"listen": self.address, **self.settings.as_config()}
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

    def _open_learning(self, policy: Policy) -> None:
        address, number = free_address(), next(self._numbers)
        folder = Path(self.folder.name) / f"{policy.name}-{number}"
        arguments = ["controller", "--listen", address, "--data-dir", str(folder)]
        child = Child("controller", arguments, address, folder.with_suffix(".log"), takes_settings=False)
        self.controllers[policy.name], self.databases[policy.name] = child, folder / "speclen.db"
        child.start()
        child.wait_until_serving(START_TIMEOUT_S)
        profile = None if policy.name == "cold" else self.profile
        if profile is not None:
            seed_controller(address, self.address, profile)
        file = profile and str(profile.resolve())
        self._tell(do="learning", name=policy.name, controller=address, profile=file)

    def _tell(self, **command: Any) -> None:
        """One command, and the worker's answer to it. Raises UserError with the worker's own words when it refuses."""
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
            raise UserError(f"the worker has ended: {self.last_line()}")
        if not (found := json.loads(answer))["ok"]:
            raise UserError(f"the worker cannot {command['do']} {command['name']}: {found['error']}")
