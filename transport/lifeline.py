"""A process that ends when the one that started it does, also by SIGKILL.

The parent alone has the writing end of a pipe, which the kernel closes with it, and the child waits for the end of the file.
Unlike a parent-death signal, that works on every POSIX system, from any thread, and before the child has begun to look.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

PIPE = "SPECLEN_LIFELINE"  # the variable that names the pipe's reading end to the child
END_S = 5.0  # for an end as by SIGTERM


def start_tied(command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that calls `end_with_parent`. It also ends when the returned object is forgotten.

    options: of subprocess.Popen.
    """
    reading, writing = os.pipe()
    try:
        options["env"] = {**(os.environ if options.get("env") is None else options["env"]), PIPE: str(reading)}
        process = subprocess.Popen(command, pass_fds=(reading,), **options)
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    weakref.finalize(process, os.close, writing)
    return process


def end_with_parent() -> None:
    """From now on this process ends with the one that started it by `start_tied`, if any did.

    To be called first, since a process of its own must not take over the variable.
    """
    if name := os.environ.pop(PIPE, ""):
        os.set_inheritable(int(name), False)
        # Nothing is ever written into it.
        end_after(partial(os.read, int(name), 1), "the process that started this one is gone, so this one ends")


def end_after(wait: Callable[[], object], reason: str) -> None:
    """End this process when `wait` returns, which a thread calls: as by SIGTERM, and by force if that takes long."""
    threading.Thread(target=_end_after, args=(wait, reason), name="lifeline", daemon=True).start()


def _end_after(wait: Callable[[], object], reason: str) -> None:
    wait()
    print(f"speclen: {reason}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)
