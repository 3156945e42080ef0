"""Choice among several controllers: the same on every machine, and few workers move when one is added.

Rendezvous hashing (Thaler and Ravishankar 1998): of all controllers the one whose address, hashed together with what is
shared out, gives the greatest number. What is learned is not exchanged between controllers, so workers that should learn
together must have the same: all of a pair of models on a device, unless these alone are too many for one.
"""

from __future__ import annotations

import hashlib

from speclen.v1 import control_pb2 as pb


def controllers(addresses: str) -> list[str]:
    """HOST:PORT, one or several with commas between; none for none."""
    return [each.strip() for each in addresses.split(",") if each.strip()]


def controller_of(addresses: str, by: str, context: pb.ContextKey, worker_id: str) -> str:
    """The controller to report to; "" for none. The order of the addresses does not matter."""
    shared = [context.target, context.draft, context.device, *([worker_id] if by == "worker" else [])]

    def score(address: str) -> bytes:
        return hashlib.sha256("\n".join([address, *shared]).encode()).digest()

    return max(controllers(addresses), key=score, default="")
