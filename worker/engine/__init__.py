"""Continuous batching: requests, rows, speculative steps."""
