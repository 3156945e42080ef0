"""Fleets of thousands of workers: what their reports cost controllers, and what decisions that are a little stale lose."""
