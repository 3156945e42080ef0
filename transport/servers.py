"""Servers of gRPC: a service with health and reflection, and health alone on an address of its own.

The latter is for orchestrators whose probes know neither TLS nor tokens. It says whether the server serves, which a port
scan would tell as well.
"""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from speclen.transport.address import check_free
from speclen.transport.aio import SERVER_OPTIONS, prepare_aio
from speclen.transport.credentials import ServerSecurity
from speclen.transport.health import Health

MOST_CALLS = 16  # probes at once; one more is refused
MOST_FILES = 10_240  # open in a process: thousands of connections over gRPC, and as many over HTTP


async def create_server(
    address: str,
    service: str,
    add_service: Callable[[aio.Server], None],
    security: ServerSecurity,
    options: Sequence[tuple[str, Any]],
    most_calls: int | None = None,
) -> tuple[aio.Server, int, Health]:
    """A server with a service, health and reflection, not started yet, its port, and the health to set.

    Raises OSError when the address cannot be bound, ValueError when certificates or tokens cannot be read.
    """
    prepare_aio()
    allow_many_files()
    interceptors = security.interceptors()
    server = aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=most_calls)
    add_service(server)
    health = Health()
    health.add_to(server)
    enable_reflection(server, service)
    return server, security.add_port(server, address), health


def enable_reflection(server: aio.Server, service: str) -> None:
    """Describe the services to callers, where `speclen[reflection]` is installed."""
    try:
        from grpc_health.v1 import health  # with the description of that service
        from grpc_reflection.v1alpha import reflection
    except ModuleNotFoundError:
        return
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def allow_many_files() -> None:
    """Raise the soft limit of open files, usually 1,024: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def set_health(health: Health, service: str, status: int) -> None:
    """Set the health of a server and of its service."""
    for name in ("", service):
        await health.set(name, status)


@asynccontextmanager
async def probed(address: str, health: Health) -> AsyncIterator[int]:
    """Answer health at an address for the length of a block, which gets the port; "" for nowhere.

    Raises ValueError or OSError in one sentence for an address that cannot be used.
    """
    if not address:
        yield 0
        return
    check_free("--probe-listen", address)
    server = aio.server(maximum_concurrent_rpcs=MOST_CALLS, options=SERVER_OPTIONS)
    health.add_to(
        server, watched=False
    )  # some calls of Watch, which anybody may make here, would leave no room for probes
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
