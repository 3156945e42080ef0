"""Other projects' programs that tests start: they end with the test process, however that ends."""

import ctypes
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def start_foreign(command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
    """Start a program that cannot be tied to this process by a pipe. On Linux alone, and from the main thread."""
    libc, parent_death_signal = ctypes.CDLL(None), 1
    return subprocess.Popen(command, preexec_fn=lambda: libc.prctl(parent_death_signal, signal.SIGKILL), **options)
