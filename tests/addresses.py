"""Addresses to listen on in tests."""

from __future__ import annotations

import socket


def free_address() -> str:
    """A port of loopback that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"
