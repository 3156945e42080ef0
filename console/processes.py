"""Child processes of `speclen up`: start, wait until they serve, restart, stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.console.errors import UserError

FIRST_PAUSE_S = 1.0  # before the first restart; doubles up to MAX_PAUSE_S, and starts over after STABLE_S of life
MAX_PAUSE_S = 30.0
STABLE_S = 60.0


def end_as_by_ctrl_c() -> None:
    """From now on SIGTERM ends this process as Ctrl-C does: its children are stopped, and nothing is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


@dataclass(slots=True)
class Child:
    """One `speclen` process: its verb, its arguments, where it listens and where it writes its log."""

    name: str
    arguments: list[str]
    address: str
    log_file: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    num_restarts: int = 0
    pause_s: float = FIRST_PAUSE_S
    restart_at: float | None = field(default=None)
    log_position: int = 0

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self.log_position = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "speclen.cli.app", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches the parent alone, which then stops the children in order.
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def last_line(self) -> str:
        """The last line of the log, which names the cause when a process has ended by itself."""
        lines = self.log_file.read_text("utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("speclen: ") if lines else "it printed nothing"

    def new_remarks(self) -> list[str]:
        """What the process has told its user since the last call: whole lines of its log that are no log records."""
        if not self.log_file.exists():
            return []
        with self.log_file.open("rb") as log:
            log.seek(self.log_position)
            text, newline, _ = log.read().rpartition(b"\n")
        self.log_position += len(text) + len(newline)
        lines = text.decode("utf-8", errors="replace").splitlines()
        return [line for line in lines if line[:1].isalpha() and " serving on " not in line]

    def is_serving(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_serving(self, timeout_s: float, say: Callable[[str], None] = lambda remark: None) -> None:
        """Pass on what it remarks meanwhile.

        Raises UserError with the process's own last words when it ends or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise UserError(f"the {self.name} did not start: {self.last_line()}")
            for remark in self.new_remarks():
                say(f"the {self.name}: {remark}")
            if self.is_serving():
                return
            time.sleep(0.1)
        raise UserError(f"the {self.name} was not ready within {timeout_s:g} s: see {self.log_file}")

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL when that did not help in time."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def restart_if_dead(self, now: float) -> str | None:
        """Starts the process again after a growing pause; returns what happened, in words, when something did."""
        code = self.exit_code
        if code is None:
            return None
        if self.restart_at is None:
            if now - self.started_at > STABLE_S:
                self.pause_s = FIRST_PAUSE_S
            self.restart_at = now + self.pause_s
            said = self.last_line() if code >= 0 else f"killed by {signal.Signals(-code).name}"
            return f"the {self.name} ended ({said}); starting it again in {self.pause_s:g} s"
        if now >= self.restart_at:
            self.restart_at = None
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
            self.num_restarts += 1
            self.start()
            return f"the {self.name} was started again"
        return None
