"""Faults done to real processes, and whether what was promised held: `scripts/chaos`."""
