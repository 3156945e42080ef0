"""Settings of a program: each is a field of a configuration class, with help and bounds. Also checks of addresses.

The command line makes a flag of every field (`speclen.cli.support.flags`), so flag, environment variable, key of the
configuration file, default and help cannot disagree. An address is HOST:PORT; errors name the flag that holds it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import Field, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

UNIX = "unix:"  # before the path of a socket, quoted as in a URL, in place of HOST:PORT
MAX_SOCKET_BYTES = 103  # of a socket's path, on any system


def setting(default: Any, help: str, *, least: float | None = None, most: float | None = None) -> Any:
    """A field of a configuration class. help: one sentence for --help. least, most: bounds, both allowed."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


def settings_of(config: type) -> Mapping[str, Field[Any]]:
    """Settings of a configuration class by name, its own before its base's. Only fields made by `setting` count."""
    own = config.__annotations__
    return {each.name: each for each in sorted(fields(config), key=lambda each: each.name not in own) if each.metadata}


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def check_bounds(config: Any) -> None:
    """Raise ValueError, naming flag and value, if a setting is out of bounds or NaN."""
    for each in settings_of(type(config)).values():
        value, least, most = getattr(config, each.name), each.metadata["least"], each.metadata["most"]
        if least is not None and not value >= least:
            raise ValueError(f"{flag(each.name)} is {value}; it must be at least {least}")
        if most is not None and not value <= most:
            raise ValueError(f"{flag(each.name)} is {value}; it must be at most {most}")


def installed_version() -> str:
    """Version of the installed package; "unknown" if the source runs without having been installed."""
    try:
        return version("speclen")
    except PackageNotFoundError:
        return "unknown"


def split_address(flag: str, address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host is in brackets. Raises ValueError naming the flag."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{flag} {address!r} is not HOST:PORT, for example 127.0.0.1:7070 or [::1]:7070")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address. Names other than localhost are not resolved, and count as False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def past_proxies(address: str) -> list[tuple[str, int]]:
    """Channel options that ignore the environment's proxy for an address on this machine."""
    return [("grpc.enable_http_proxy", 0)] if is_loopback(address.rpartition(":")[0].strip("[]")) else []


def unix_address(path: Path) -> str:
    """Address of a Unix socket for gRPC. Raises ValueError if the path is too long."""
    if (num_bytes := len(os.fsencode(path))) > MAX_SOCKET_BYTES:
        raise ValueError(f"the socket's path {path} has {num_bytes} bytes, over the system's {MAX_SOCKET_BYTES}")
    return f"{UNIX}{quote(os.fsencode(path))}"


def bind(flag: str, address: str) -> socket.socket:
    """A socket bound to HOST:PORT. Raises OSError if the port is taken, ValueError if the address is malformed."""
    host, port = split_address(flag, address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's algorithm, which would delay chunks by 40 ms, only if the protocol is given.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {address}: {error.strerror}; choose another with {flag}") from error
    return bound


def check_free(flag: str, address: str) -> None:
    """Raise OSError if the port is taken: a check before anything slow starts."""
    bind(flag, address).close()
