"""Progress of a process that is not ready yet: it computes, reads, writes or downloads."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape

from speclen.cli.support.errors import say

NEWS_S = 20.0  # between two words about a start that takes long
WORK_CPU_S = 0.5  # processor time that counts as a sign of work; idle threads of gRPC take less in minutes
WORK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Work:
    """Resources used so far: seconds of processor time, bytes read and written, sockets included."""

    cpu_s: float
    num_bytes: int


def work_of(pid: int) -> Work | None:
    """None where the system does not tell, or the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # utime and stime are fields 14 and 15 of the line, the state after the name is field 3.
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Work(cpu_s, int(counts["rchar"]) + int(counts["wchar"]))


@dataclass(slots=True)
class Progress:
    """Follows one process from its start. Times in seconds of one clock. pid: None for a process that never started."""

    pid: int | None
    started_at: float
    doing: str = "starting"
    _seen: Work | None = None
    _moved_at: float = field(init=False)
    _told_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._moved_at = self._told_at = self.started_at

    def note(self, remark: str) -> None:
        """Take what the process says it does now."""
        self.doing = remark

    def stalled(self, now: float, patience_s: float) -> bool:
        """True if nothing has moved for patience_s. A living process that cannot be looked into is taken to work."""
        work = work_of(self.pid) if self.pid is not None else Work(0.0, 0)
        if work is None or self._seen is None or self._moved_on(work):
            self._seen, self._moved_at = work, now
        return now - self._moved_at >= patience_s

    def _moved_on(self, work: Work) -> bool:
        assert self._seen is not None
        return work.cpu_s - self._seen.cpu_s >= WORK_CPU_S or work.num_bytes - self._seen.num_bytes >= WORK_BYTES

    def news(self, now: float) -> str:
        """The work in hand, every NEWS_S; else ""."""
        if now - self._told_at < NEWS_S:
            return ""
        self._told_at = now
        used = (
            f", {self._seen.cpu_s:.0f} s of processor time, {self._seen.num_bytes / 1e9:.1f} GB moved"
            if self._seen
            else ""
        )
        return f"still at: {self.doing} ({now - self.started_at:.0f} s{used})"


class LiveLine:
    """One line about the work in hand on stderr: overwritten in a terminal, elsewhere a new line for each new text."""

    def __init__(self) -> None:
        self.console, self.text = Console(stderr=True, highlight=False), ""
        self.status = self.console.status("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def show(self, text: str, detail: str = "") -> None:
        """Show both in a terminal, cut to its width; elsewhere the text alone, unless it is the same as before."""
        if self.console.is_interactive:
            self.status.update(escape(f"{text}{detail}"[: self.console.width - 3]))
            self.status.start()
        elif text != self.text:
            self.text = text
            say(text)
