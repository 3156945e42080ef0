"""Places in the writer where a test can have the process killed. For tests only.

SPECLEN_FAILPOINT=name kills the process with SIGKILL the first time it gets to `name`; name:3 the third time.
"""

from __future__ import annotations

import os
import signal

# In the order in which one commit passes them.
FAILPOINTS = (
    "before_begin",
    "after_begin",
    "after_workers",
    "after_reports",
    "after_predictions",
    "after_estimates",
    "after_retention",
    "before_commit",
    "after_commit",
    "before_done",
    "after_done",
    "after_vacuum",
)


class Failpoints:
    """Counts passes of one place and kills the process there."""

    def __init__(self, setting: str | None = None) -> None:
        """setting: "name" or "name:count", by default that of the environment. ValueError for an unknown name."""
        setting = os.environ.get("SPECLEN_FAILPOINT", "") if setting is None else setting
        self._name, _, count = setting.partition(":")
        self._remaining = int(count or 1)
        if self._name and self._name not in FAILPOINTS:
            raise ValueError(f"SPECLEN_FAILPOINT names {self._name!r}; known are: {', '.join(FAILPOINTS)}.")

    def reach(self, name: str) -> None:
        """Die here if it is the place and the time."""
        self._remaining -= name == self._name
        if name == self._name and self._remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
