"""Benchmarks behind `speclen bench`."""
