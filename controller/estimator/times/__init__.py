"""How long steps take, and how fast the machine is at the moment."""
