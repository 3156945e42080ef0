"""Load of a controller by simulated workers: the most that it takes, and fleets of several sizes."""
