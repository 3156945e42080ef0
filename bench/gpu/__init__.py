"""Checks and benchmarks of `scripts/gpu_check`, for a machine with a GPU."""
