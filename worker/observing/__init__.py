"""Observability of a worker: the metrics page, and traces of requests."""
