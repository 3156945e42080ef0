"""Faults injected into real processes, and whether the promises held: `scripts/chaos`."""
