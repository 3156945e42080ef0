"""Other people's programs against a worker's HTTP front."""
