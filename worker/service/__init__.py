"""The services of a worker: Generate, health, metrics."""
