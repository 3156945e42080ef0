"""Health probe for containers: exits with code 0 if the server at its --probe-listen address is SERVING.

Example: python -m speclen.cli.health worker 127.0.0.1:7081
"""

from __future__ import annotations

import sys

import grpc

from speclen.cli.support.client import Client
from speclen.cli.support.output import UserError
from speclen.process.health import SERVING, STATUSES, check


def problem(kind: str, address: str) -> str:
    """One sentence, empty if the worker or controller (`kind`) serves. Raises UserError if the address is malformed."""
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
