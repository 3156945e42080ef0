"""Exit code 0 when a server is SERVING: a probe for containers, at the server's --probe-listen.

Example: python -m speclen.cli.support.health worker 127.0.0.1:7081
"""

from __future__ import annotations

import sys

import grpc

from speclen.cli.support.client import Client
from speclen.cli.support.errors import UserError
from speclen.transport.health import SERVING, STATUSES, check


def problem(kind: str, address: str) -> str:
    """One sentence, or nothing when the worker or controller (`kind`) serves. Raises UserError for no address."""
    client = Client()
    with client.channel(address) as channel:
        try:
            status = check(channel, timeout_s=3.0)
        except grpc.RpcError as error:
            return client.explain(error, kind, address)
    return "" if status == SERVING else f"the {kind} at {address} is {STATUSES.get(status, status)}"


if __name__ == "__main__":
    try:
        found = problem(*sys.argv[1:])
    except UserError as error:
        found = str(error)
    sys.exit(found or 0)
