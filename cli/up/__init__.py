"""`speclen up`: a controller and workers in one terminal, and the demonstration."""
