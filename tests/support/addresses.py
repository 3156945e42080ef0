"""Addresses to listen on in tests."""

import contextlib
import random
import socket


def free_address() -> str:
    """An unused port of loopback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def two_free_ports(host: str = "127.0.0.1") -> int:
    """The first of two neighbouring unused ports, below the range of ephemeral ports."""
    for port in random.sample(range(20_000, 32_000, 2), 100):
        with contextlib.suppress(OSError), socket.create_server((host, port)), socket.create_server((host, port + 1)):
            return port
    raise OSError("no two neighbouring ports are free")
