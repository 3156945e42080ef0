"""Spinning of CPU threads that wait for each other. Imports no torch, since it must come first."""

from __future__ import annotations

import os

# Looks at a barrier before sleeping, about 0.1 ms: longer than the pauses within a pass, so that its threads need not be
# woken for every operator, and so short that a worker without requests uses no processor time.
SPINS = "10000"


def set_spins() -> None:
    """Tell OpenMP, which reads it when torch is imported. What the environment says about it goes before."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
