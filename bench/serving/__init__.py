"""`speclen bench serve`: policies compared on the same traffic, on one warm worker."""
