"""Servers of gRPC: a service with health and reflection, and health alone on an address of its own.

The latter is for orchestrators whose probes know neither TLS nor tokens. It says whether the server serves, which a port
scan would tell as well.
"""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from speclen.transport.address import check_free
from speclen.transport.aio import SERVER_OPTIONS, prepare_aio
from speclen.transport.credentials import ServerSecurity

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
MOST_CALLS = 16  # probes at once; one more is refused
MOST_FILES = 10_240  # open in a process: thousands of connections over gRPC, and as many over HTTP


async def create_server(
    address: str,
    service: str,
    add_service: Callable[[aio.Server], None],
    security: ServerSecurity,
    options: Sequence[tuple[str, Any]],
    most_calls: int | None = None,
) -> tuple[aio.Server, int, health.aio.HealthServicer]:
    """A server with a service, health and reflection, not started yet, its port, and the health to set.

    Raises OSError when the address cannot be bound, ValueError when certificates or tokens cannot be read.
    """
    prepare_aio()
    allow_many_files()
    interceptors = security.interceptors()
    server = aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=most_calls)
    add_service(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return server, security.add_port(server, address), health_servicer


def allow_many_files() -> None:
    """Raise the soft limit of open files, usually 1,024: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def set_health(servicer: health.aio.HealthServicer, service: str, status: int) -> None:
    """Set the health of a server and of its service."""
    for name in ("", service):
        await servicer.set(name, status)


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
