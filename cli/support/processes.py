"""Child processes of `speclen up`: start them, wait until they serve, restart and stop them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from speclen.cli.support.client import Client, identity, occupant
from speclen.cli.support.output import UserError
from speclen.process.health import SERVING, check
from speclen.process.supervision import start_tied

FIRST_PAUSE_S = 1.0  # before the first restart; doubles up to MAX_PAUSE_S, and is reset once a child ran for STABLE_S
MAX_PAUSE_S = 30.0
STABLE_S = 60.0
NEWS_S = 20.0  # between two lines about a slow start


def end_as_by_ctrl_c() -> None:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that children are stopped.

    SIGHUP (a closed terminal, which sends it repeatedly) does the same, except under nohup.
    """

    def interrupt(number: int, *_: object) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, interrupt)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without speclen's settings."""
    return {name: value for name, value in environment.items() if not name.startswith("SPECLEN_")}


@dataclass(slots=True)
class Child:
    """One `speclen` process: its arguments (the verb first), the address it listens on, and its log file.

    num_remarked: lines of the log already passed on. run_id: the server at the address has to belong to this run; empty: to
    any. takes_settings: whether the child reads settings from the environment; benchmarks pass all settings themselves.
    """

    name: str
    arguments: list[str]
    address: str
    log_file: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    restart_at: float | None = None
    log_begin: int = 0
    num_remarked: int = 0
    run_id: str = ""
    client: Client = field(default_factory=Client)
    takes_settings: bool = True

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self.log_begin, self.num_remarked = log.tell(), 0
            self.process = start_tied(
                [sys.executable, "-m", "speclen.cli.app", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if self.takes_settings else without_settings(os.environ),
                # Ctrl-C reaches only the parent, which then stops the children, the controller last.
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def last_words(self) -> str:
        """The signal that killed the process, or the last line that it logged."""
        code = self.exit_code
        return self.last_line() if code is None or code >= 0 else f"it was sent a signal: {signal.strsignal(-code)}"

    def last_line(self) -> str:
        """The last line logged since the start, which names the cause if the process ended by itself."""
        lines = self._logged().strip().splitlines()
        if not lines:
            return "it printed nothing"
        # The user cannot pass a flag to a child, but can set the environment variable.
        variable = f"SPECLEN_{self.kind.upper()}_MOVE_CORRUPT_ASIDE=1 in the environment"
        return lines[-1].removeprefix("speclen: ").replace("--move-corrupt-aside", variable)

    def _logged(self) -> str:
        """Everything logged since the start; "" if the file was deleted."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(self.log_begin)
                return log.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def new_remarks(self) -> list[str]:
        """New complete lines of the log for the user, without log records, start messages and the final error."""
        lines = self._logged().splitlines(keepends=True)
        new = [line.rstrip() for line in lines[self.num_remarked :] if line.endswith("\n")]
        self.num_remarked += len(new)
        known = (" serving on ", f"starting a {self.kind} on ", "speclen: ")
        return [line for line in new if line[:1].isalpha() and not any(words in line for words in known)]

    @property
    def kind(self) -> str:
        """Its verb: worker or controller."""
        return self.arguments[0]

    def is_serving(self) -> bool:
        """True if the child answers. Raises UserError if another server answers, or the child rejects our token."""
        says_so = self.process is not None and f" serving on {self.address}" in self._logged()
        with self.client.channel(self.address) as channel:
            try:
                status = check(channel, timeout_s=1.0)
                found = identity(channel, self.kind) if self.run_id else None
            except grpc.RpcError as error:
                self._give_up_if_hopeless(error, says_so)
                return False
        if found is not None and found.run_id != self.run_id:
            raise UserError(f"{self.address} is taken by {occupant(self.address, self.client)}: choose another address")
        return status == SERVING

    def _give_up_if_hopeless(self, error: grpc.RpcError, says_so: bool) -> None:
        """Raise UserError if no call can succeed. says_so: it had logged that it serves before it was called."""
        assert isinstance(error, grpc.Call)
        hopeless = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
        if error.code() in hopeless or (error.code() is grpc.StatusCode.UNAVAILABLE and says_so):
            raise UserError(self.client.explain(error, self.kind, self.address))

    def wait_until_serving(self, timeout_s: float = math.inf, say: Callable[[str], None] = lambda remark: None) -> None:
        """Wait until the child serves, and report its remarks; a download of a large model may take long.

        Raises UserError with the last line of its log if it ends, or naming the log when the time is up.
        """
        begin = told_at = time.monotonic()
        doing = "starting"
        while time.monotonic() - begin < timeout_s:
            if self.exit_code is not None:
                raise UserError(f"{self.name} did not start: {self.last_words()}")
            for doing in self.new_remarks():
                say(f"{self.name}: {doing}")
            if self.is_serving():
                return
            if time.monotonic() - told_at >= NEWS_S:
                told_at = time.monotonic()
                say(f"{self.name}: {doing} ({told_at - begin:.0f} s so far)")
            time.sleep(0.1)
        raise UserError(f"{self.name} does not serve after {timeout_s:g} s: see {self.log_file}")

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, then SIGKILL if the process is still alive after timeout_s."""
        self.tell_to_end()
        self.wait_for_end(timeout_s)

    def tell_to_end(self) -> None:
        if self.exit_code is None and self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait for the process to end; send SIGKILL after timeout_s."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def restart_if_dead(self, now: float) -> str | None:
        """Restart the process after a growing pause if it has ended. Returns a sentence if something happened."""
        code = self.exit_code
        if code is None:
            return None
        if self.restart_at is None:
            if now - self.started_at > STABLE_S:
                self.pause_s = FIRST_PAUSE_S
            self.restart_at = now + self.pause_s
            return f"{self.name} ended ({self.last_words()}); starting it again in {self.pause_s:g} s"
        if now >= self.restart_at:
            self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
            try:
                self.start()
            except OSError as error:  # the other children keep running
                self.restart_at = now + self.pause_s
                return f"{self.name} cannot be started ({error.strerror}); trying again in {self.pause_s:g} s"
            self.restart_at = None
            return f"{self.name} was started again"
        return None


def stop_all(children: Sequence[Child], timeout_s: float) -> None:
    """Stop all workers at once, then the controller, which receives their last reports. timeout_s: for each.

    If this is interrupted, the remaining processes are killed.
    """
    workers = [child for child in children if child.kind != "controller"]
    try:
        for worker in workers:
            worker.tell_to_end()
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.wait_for_end(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.stop(timeout_s)  # only the controller is left
    finally:
        for child in children:
            child.stop(0.0)
