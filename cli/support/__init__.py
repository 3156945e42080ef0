"""Shared by verbs: output and errors, flags, clients, the database, child processes."""
