"""Several servers behind one channel: gRPC's own balancing, by the list of addresses that its resolvers take."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from speclen.transport.address import split_address

Option = tuple[str, Any]


def balanced(flag: str, addresses: str) -> tuple[str, list[Option]]:
    """Target and options of a channel to HOST:PORT, or to several with commas between, in turn.

    A single name is left to gRPC's resolver, which balances over all its addresses. Several are looked up here, since a
    target holds numbers alone then. Raises ValueError naming the flag.
    """
    options: list[Option] = [("grpc.lb_policy_name", "round_robin")]
    named = [each.strip() for each in addresses.split(",")]
    if len(named) == 1:
        split_address(flag, named[0])
        return named[0], options
    places = [split_address(flag, each) for each in named]
    found = [looked_up(flag, *place) for place in places]
    family = "ipv6" if any(ip.version == 6 for ip, _ in found) else "ipv4"
    if len({ip.version for ip, _ in found}) > 1:
        raise ValueError(f"{flag} {addresses!r} mixes IPv4 and IPv6, which gRPC does not take: give one kind")
    written = (f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}" for ip, port in found)
    return f"{family}:{','.join(written)}", [*options, ("grpc.default_authority", places[0][0])]


def looked_up(flag: str, host: str, port: int) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """The address of a host, IPv4 where it has one. Raises ValueError where there is none."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"{flag} {host}:{port} has no address: {error.strerror}") from error
    texts = [str(answer[4][0]) for answer in sorted(answers, key=lambda answer: answer[0] != socket.AF_INET)]
    return ipaddress.ip_address(texts[0]), port
