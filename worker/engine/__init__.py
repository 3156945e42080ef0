"""Continuous batching: rows, plans, speculative steps."""
