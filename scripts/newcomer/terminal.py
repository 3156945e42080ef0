"""Runs commands in a terminal of 80 columns, and looks at what they print as a person would. Standard library only."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS, ROWS = 80, 24
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


@dataclass
class Seen:
    """Output of a command on the screen, its exit code and its duration."""

    line: str
    text: str
    code: int | None
    took_s: float

    def faults(self, columns: int = COLUMNS) -> list[str]:
        """Faults that no command may show. columns: 0 for text that is not ours, such as a model's."""
        found = [] if "Traceback (most recent" not in self.text else ["a traceback"]
        long = [line for line in self.text.splitlines() if columns and len(line) > columns]
        return found + [f"a line of {len(line)} columns: {line[:60]}…" for line in long[:1]]


@dataclass
class Running:
    """A command that goes on in a terminal of its own."""

    line: str
    process: subprocess.Popen[bytes]
    screen: int
    begun: float = field(default_factory=time.monotonic)
    raw: bytearray = field(default_factory=bytearray)

    def text(self) -> str:
        """Text on the screen: without colours, and of lines that were written over only the last."""
        plain = ESCAPES.sub("", self.raw.decode("utf-8", errors="replace")).replace("\r\n", "\n")
        return "\n".join(line.rpartition("\r")[2].rstrip() for line in plain.split("\n"))

    def read(self, timeout_s: float) -> bool:
        """Take what it has printed; False once it has closed its terminal."""
        if not select.select([self.screen], [], [], timeout_s)[0]:
            return True
        try:
            got = os.read(self.screen, 65536)
        except OSError:  # how Linux says that the other side is gone
            return False
        self.raw += got
        return bool(got)

    def wait_for(self, words: str, timeout_s: float) -> bool:
        """True if the words come up in time and the command is still there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if words in self.text():
                return True
            if not self.read(0.2):
                return words in self.text()
        return False

    def end(self, timeout_s: float, interrupt: bool = False) -> Seen:
        """Wait for its end, or bring it about by Ctrl-C."""
        if interrupt and self.process.poll() is None:
            os.write(self.screen, b"\x03")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.read(0.1):
            pass
        try:
            code: int | None = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            code = None
        took = time.monotonic() - self.begun
        os.close(self.screen)
        return Seen(self.line, self.text().strip("\n"), code, took)


@dataclass
class Terminal:
    """A folder and an environment in which commands are typed."""

    folder: Path
    environment: dict[str, str]

    def start(self, line: str, **variables: str) -> Running:
        """Type a line, and go on."""
        screen, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

        def own_terminal() -> None:
            os.setsid()
            # A background job of a shell hands on that it ignores these; a terminal's programs do not begin so.
            for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
                signal.signal(ignored, signal.SIG_DFL)
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env={**self.environment, "TERM": "xterm-256color", **variables},
            stdin=end,
            stdout=end,
            stderr=end,
            preexec_fn=own_terminal,
        )
        os.close(end)
        return Running(" ".join([*(f"{name}={value}" for name, value in variables.items()), line]), process, screen)

    def type(self, line: str, timeout_s: float = 60.0, **variables: str) -> Seen:
        """Type a line and wait for its end; code None when it did not come."""
        return self.start(line, **variables).end(timeout_s)
