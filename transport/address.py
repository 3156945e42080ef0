"""Addresses of servers, and the check that they are not open to others by mistake."""

from __future__ import annotations

import ipaddress
import socket


def split_address(flag: str, address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host is in brackets. Raises ValueError naming the flag."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{flag} {address!r} is not HOST:PORT, for example 127.0.0.1:7070 or [::1]:7070")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches; a name other than localhost is not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def past_proxies(address: str) -> list[tuple[str, int]]:
    """Options of a gRPC channel to HOST:PORT: a proxy that the environment names has no place within one machine."""
    return [("grpc.enable_http_proxy", 0)] if is_loopback(address.rpartition(":")[0].strip("[]")) else []


def bind(flag: str, address: str) -> socket.socket:
    """A socket bound to HOST:PORT. Raises OSError when it is taken, ValueError for no address."""
    host, port = split_address(flag, address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With a named protocol asyncio switches Nagle's algorithm off, which would delay chunks by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {address}: {error.strerror}; choose another with {flag}") from error
    return bound


def check_free(flag: str, address: str) -> None:
    """Raise OSError at once when the port is taken, before anything slow starts."""
    bind(flag, address).close()
