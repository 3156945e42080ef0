"""Commands in a terminal of 80 columns, by `script` of util-linux, and what is wrong with their output."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
# Set by Kubernetes for a service named speclen; speclen must not take them for settings.
KUBERNETES = {"SPECLEN_SERVICE_HOST": "10.0.0.1", "SPECLEN_SERVICE_PORT": "7070", "SPECLEN_PORT": "tcp://10.0.0.1:7070"}


@dataclass(frozen=True)
class Running:
    """A command that runs in a terminal of its own."""

    line: str
    process: subprocess.Popen[bytes]
    screen: Path
    begun: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        """Text on the screen, without escape codes. Of a line that was overwritten in place, only the last version."""
        plain = ESCAPES.sub("", self.screen.read_text("utf-8", errors="replace")).replace("\r\n", "\n")
        return "\n".join(line.rpartition("\r")[2].rstrip() for line in plain.split("\n")).strip("\n")

    def wait_for(self, words: str, timeout_s: float) -> bool:
        """True if the words come up in time."""
        deadline = time.monotonic() + timeout_s
        while words not in self.text() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return words in self.text()

    def interrupt(self) -> None:
        """Ctrl-C."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\x03")
        self.process.stdin.flush()


@dataclass
class Terminal:
    """A folder where nothing of the checkout is, the environment that is active there, and the faults that were seen."""

    folder: Path
    faults: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        """Close all terminals: what still runs in them ends."""
        for process in self.processes:
            process.kill()

    def start(self, line: str, **variables: str) -> Running:
        """Type a line, and go on."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        ours = ("SPECLEN_", "PYTHON", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | KUBERNETES | variables
        path = {"PATH": f"{self.folder}/venv/bin:{os.environ['PATH']}", "TERM": "xterm-256color"}
        screen = self.folder / f"screen-{time.monotonic_ns()}"
        with screen.open("wb") as output:
            process = subprocess.Popen(
                ["script", "-qefc", f"stty cols 80 rows 24; {line}", "/dev/null"],
                cwd=home,
                env=kept | path,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        self.processes.append(process)
        return Running(line, process, screen)

    def end(
        self, running: Running, columns: int = 80, code: int = 0, quiet: bool = False, timeout_s: float = 60
    ) -> str:
        """Wait for its end, print it, and note what is wrong with it. columns: 0 for text that is not ours."""
        try:
            found: int | None = running.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            running.process.kill()
            found = running.process.wait()
        text = running.text()
        if not quiet:
            took_s = time.monotonic() - running.begun
            print(f"\n$ {running.line}\n{text}\n[{took_s:.1f} s, exit code {found}]", flush=True)
        long = next((line for line in text.splitlines() if columns and len(line) > columns), "")
        self.must(running.line, "Traceback (most recent" not in text, "a traceback")
        self.must(running.line, not long, f"a line of {len(long)} columns: {long[:60]}…")
        self.must(running.line, found == code, f"exit code {found} instead of {code}")
        return text

    def type(
        self, line: str, columns: int = 80, code: int = 0, quiet: bool = False, timeout_s: float = 60, **variables: str
    ) -> str:
        """Type a line and wait for its end. Returns what it printed."""
        return self.end(self.start(line, **variables), columns, code, quiet, timeout_s)

    def must(self, line: str, fact: bool, fault: str) -> None:
        if not fact:
            self.faults.append(f"{line}: {fault}")
            print(f"FAULT: {line}: {fault}", flush=True)
