"""speclen inside other people's engines. Nothing else of ours imports it."""
