"""A neighbour that computes on this process's core is seen."""

import os
import subprocess
import sys

import pytest

from speclen.worker.backends import threads
from tests.support.foreign import start_foreign


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux with schedstat")
def test_a_busy_neighbour_on_the_same_core_is_seen():
    core = min(threads.usable_cores())
    script = (
        f"import os, sys, time; os.sched_setaffinity(0, {{{core}}})\n"
        "from speclen.worker.backends.threads import read_usage, waited_share\n"
        f"before = read_usage({{{core}}})\n"
        "end = time.monotonic() + 1.0\n"
        "while time.monotonic() < end: pass\n"
        f"print(waited_share(before, read_usage({{{core}}})))"
    )
    hog = start_foreign([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    finally:
        hog.kill()
        hog.wait()
    assert float(found.stdout) > threads.CROWDED
