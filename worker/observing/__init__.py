"""Observability of a worker: the metrics page."""
