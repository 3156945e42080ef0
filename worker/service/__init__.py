"""What a worker serves: Generate, health, metrics."""
