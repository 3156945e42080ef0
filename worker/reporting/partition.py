"""Choice among several controllers: the same on every machine, and few workers move when one is added.

Rendezvous hashing (Thaler and Ravishankar 1998): the controller whose address, hashed with pair and device, is largest.
Controllers exchange nothing, so workers that learn together need the same one: all of a pair and device.
"""

from __future__ import annotations

import hashlib

from speclen.v1 import control_pb2 as pb


def controllers(addresses: str) -> list[str]:
    """HOST:PORT, one or several with commas between; none for none."""
    return [each.strip() for each in addresses.split(",") if each.strip()]


def controller_of(addresses: str, context: pb.ContextKey) -> str:
    """The controller of a worker; "" for none. The order of the addresses does not matter."""
    shared = context.target, context.draft, context.device

    def score(address: str) -> bytes:
        return hashlib.sha256("\n".join([address, *shared]).encode()).digest()

    return max(controllers(addresses), key=score, default="")
