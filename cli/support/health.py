"""Exit code 0 when a server is SERVING: a probe for containers, which speaks TLS and shows the token.

Example: python -m speclen.cli.support.health worker 127.0.0.1:7080 --token-file token
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from speclen.cli.support.client import Client
from speclen.cli.support.errors import UserError


def problem(kind: str, address: str, client: Client) -> str:
    """One sentence, or nothing when it serves."""
    with client.channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3.0)
        except grpc.RpcError as error:
            return client.explain(error, kind, address)
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if name == "SERVING" else f"the {kind} at {address} is {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("worker", "controller"))
    parser.add_argument("address")
    for name in ("ca", "cert", "key", "token-file"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args()
    try:
        found = problem(given.kind, given.address, Client(given.ca, given.cert, given.key, given.token_file))
    except UserError as error:
        found = str(error)
    sys.exit(found or 0)


if __name__ == "__main__":
    main()
