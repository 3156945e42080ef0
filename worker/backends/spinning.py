"""Spinning of CPU threads that wait for each other. Without torch, since it must come first."""

from __future__ import annotations

import os

# Spins before a thread sleeps, about 0.1 ms: longer than pauses within a pass, so that threads need no wake-up for every
# operator, and so short that an idle worker uses no processor time.
SPINS = "10000"


def set_spins() -> None:
    """Set OpenMP's spin count, read when torch is imported, unless the environment sets a policy."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
