"""Keeps what the controller learned in SQLite. The only code that knows SQL."""
