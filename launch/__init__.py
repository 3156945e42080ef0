"""Starting processes, and what every command needs."""
