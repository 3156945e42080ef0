"""The service grpc.health.v1, which orchestrators ask, and a call of it.

The package grpcio-health-checking wants a gRPC at least as new as itself, and would replace that of an environment in which
speclen is installed next to an engine. The service has two small messages, for which well-known ones of the same wire format
stand here: {string service = 1} and {enum status = 1}.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from grpc import aio

NAME = "grpc.health.v1.Health"
SERVING, NOT_SERVING, UNKNOWN_SERVICE = 1, 2, 3
STATUSES = {0: "UNKNOWN", SERVING: "SERVING", NOT_SERVING: "NOT_SERVING", UNKNOWN_SERVICE: "SERVICE_UNKNOWN"}


class Health:
    """Status by service, for one event loop; "" is the server as a whole."""

    def __init__(self) -> None:
        self._statuses = {"": SERVING}
        self._changed = asyncio.Condition()

    async def set(self, service: str, status: int) -> None:
        async with self._changed:
            self._statuses[service] = status
            self._changed.notify_all()

    def add_to(self, server: aio.Server, watched: bool = True) -> None:
        """Serve Check and Watch. watched=False: no Watch, whose calls last and take the room of others."""
        handlers: dict[str, Any] = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self._check, StringValue.FromString, Int32Value.SerializeToString
            )
        }
        if watched:
            handlers["Watch"] = grpc.unary_stream_rpc_method_handler(
                self._watch, StringValue.FromString, Int32Value.SerializeToString
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))

    async def _check(self, request: StringValue, context: aio.ServicerContext[Any, Any]) -> Int32Value:
        status = self._statuses.get(request.value)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.value!r}")
        return Int32Value(value=status)

    async def _watch(self, request: StringValue, context: aio.ServicerContext[Any, Any]) -> None:
        """The status, and each later one, until the caller leaves."""
        sent = None
        while True:
            async with self._changed:
                while (status := self._statuses.get(request.value, UNKNOWN_SERVICE)) == sent:
                    await self._changed.wait()
            sent = status
            await context.write(Int32Value(value=status))


def check(channel: grpc.Channel, timeout_s: float) -> int:
    """Status of the server as a whole. Raises grpc.RpcError."""
    call = channel.unary_unary(f"/{NAME}/Check", StringValue.SerializeToString, Int32Value.FromString)
    return int(call(StringValue(), timeout=timeout_s).value)
