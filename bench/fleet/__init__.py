"""Load of a controller by the number of workers that report to it."""
