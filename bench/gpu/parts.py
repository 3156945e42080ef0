"""Parts of a run on a GPU: processes that follow each other and share the time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GRACE_S = 20.0  # between the signal that asks a part to end and the one that makes it


@dataclass(frozen=True, slots=True)
class Part:
    """One process. result: the JSON that it writes, whose name is the part's. share: of the time, against other parts'.

    command: the arguments, given the seconds that it has. paths: searched for packages before the environment's.
    missing: why it cannot run, or "".
    """

    result: Path
    share: float
    command: Callable[[float], list[str]]
    paths: Sequence[Path] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """end: "done", "cut off", "failed" or "skipped". words: why, or the last line of the part's log."""

    part: str
    end: str
    seconds: float
    words: str


def run_parts(parts: Sequence[Part], seconds: float, say: Callable[[str], None]) -> list[Outcome]:
    """Run all parts in order. A part gets its share of what is left, so time that one does not use is for the next."""
    until, outcomes = time.monotonic() + seconds, list[Outcome]()
    for number, part in enumerate(parts):
        shares = sum(one.share for one in parts[number:] if not one.missing)
        outcomes.append(one := run_part(part, part.share * (until - time.monotonic()) / max(shares, part.share)))
        say(f"{one.part}: {one.end} after {one.seconds:.0f} s: {one.words}")
    return outcomes


def run_part(part: Part, seconds: float) -> Outcome:
    """seconds: after which it is cut off, with GRACE_S of them for a proper end."""
    begun, name, log = time.monotonic(), part.result.stem, part.result.with_suffix(".log")
    part.result.unlink(missing_ok=True)
    if part.missing:
        return Outcome(name, "skipped", 0.0, part.missing)
    limit = max(1.0, seconds - GRACE_S)
    path = os.pathsep.join([*map(str, part.paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command(limit),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            # A shell's background jobs ignore interrupts, and so would the part.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    try:
        end = "failed" if process.wait(limit) else "done"
    except subprocess.TimeoutExpired:
        end = "cut off"
    finally:
        stop(process)
    if end == "cut off" and not part.result.exists():
        end = "failed"
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return Outcome(name, end, time.monotonic() - begun, lines[-1] if lines else "it printed nothing")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a part that still runs, so that it keeps its results; then end whatever is left of its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
