"""The `speclen` command."""
