"""Why a controller was not reached, and what to do about it: the sentence that an operator reads."""

from __future__ import annotations

import grpc
from grpc import aio

WAYS_OUT = {
    grpc.StatusCode.UNAVAILABLE: "start one there, or correct --controller; one with TLS needs --controller-ca",
    grpc.StatusCode.DEADLINE_EXCEEDED: "is --controller the right address?",
    grpc.StatusCode.UNAUTHENTICATED: "name the file with its token by --controller-token-file",
    grpc.StatusCode.UNIMPLEMENTED: "another program, or another version, answers there: correct --controller",
    grpc.StatusCode.FAILED_PRECONDITION: "another worker has the same --worker-id, or --run-id is another run's",
    grpc.StatusCode.INVALID_ARGUMENT: "worker and controller may be of different versions: install the same",
}


def why(error: grpc.RpcError) -> str:
    """Status, what the other side said, and the way out."""
    if not isinstance(error, aio.AioRpcError):
        return str(error)
    way_out = WAYS_OUT.get(error.code())
    return f"{error.code().name}: {error.details()}{f'; {way_out}' if way_out else ''}"
