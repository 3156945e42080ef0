"""Exit code 0 when a server is SERVING: a probe for containers, at the server's --probe-listen.

Example: python -m speclen.cli.support.health worker 127.0.0.1:7081
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.cli.support.client import Client
from speclen.cli.support.errors import UserError


def problem(kind: str, address: str) -> str:
    """One sentence, or nothing when the worker or controller (`kind`) serves. Raises UserError for no address."""
    client = Client()
    with client.channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3.0)
        except grpc.RpcError as error:
            return client.explain(error, kind, address)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if name == "SERVING" else f"the {kind} at {address} is {name}"


if __name__ == "__main__":
    try:
        found = problem(*sys.argv[1:])
    except UserError as error:
        found = str(error)
    sys.exit(found or 0)
