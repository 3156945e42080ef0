"""What a worker tells of itself: the metrics page, and traces of requests."""
