"""Health on an address of its own, for orchestrators whose probes know neither TLS nor tokens.

Nothing but the health service answers there: whether the server serves, which a port scan would tell as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc

from speclen.transport.address import check_free
from speclen.transport.aio import SERVER_OPTIONS

MOST_CALLS = 16  # probes at once; one more is refused


class CheckAlone(health_pb2_grpc.HealthServicer):
    """Answers Check. Watch keeps its call: some of those, which anybody may make here, would leave no room for probes."""

    def __init__(self, servicer: health.aio.HealthServicer) -> None:
        self._servicer = servicer

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._servicer.Check(request, context)

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this address answers Check alone")


@asynccontextmanager
async def probed(address: str, servicer: health.aio.HealthServicer) -> AsyncIterator[int]:
    """Answer health at an address for the length of a block, which gets the port; "" for nowhere.

    Raises ValueError or OSError in one sentence for an address that cannot be used.
    """
    if not address:
        yield 0
        return
    check_free("--probe-listen", address)
    server = aio.server(maximum_concurrent_rpcs=MOST_CALLS, options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(CheckAlone(servicer), server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
