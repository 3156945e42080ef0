"""The health service works with clients of grpcio-health-checking, without using that package."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as rpc

from speclen.process.health import NOT_SERVING, SERVING, UNKNOWN_SERVICE, Health, check


async def served(health: Health, **options: Any) -> tuple[aio.Server, str]:
    server = aio.server()
    health.add_to(server, **options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_a_client_reads_the_status_of_the_server_and_of_a_service():
    health = Health()
    server, address = await served(health)
    await health.set("store", NOT_SERVING)
    async with aio.insecure_channel(address) as channel:
        stub = rpc.HealthStub(channel)
        assert (await stub.Check(pb.HealthCheckRequest())).status == SERVING
        assert (await stub.Check(pb.HealthCheckRequest(service="store"))).status == NOT_SERVING
        with pytest.raises(aio.AioRpcError, match="there is no service 'x'") as error:
            await stub.Check(pb.HealthCheckRequest(service="x"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(address) as channel:
        assert await asyncio.to_thread(check, channel, 10.0) == SERVING
    await server.stop(None)


async def test_a_watcher_gets_every_change():
    health = Health()
    server, address = await served(health)
    async with aio.insecure_channel(address) as channel:
        watches = [rpc.HealthStub(channel).Watch(pb.HealthCheckRequest(service="late")) for _ in range(2)]
        for status in (UNKNOWN_SERVICE, SERVING, NOT_SERVING):
            if status != UNKNOWN_SERVICE:
                await health.set("late", status)
            assert [(await watch.read()).status for watch in watches] == [status] * 2
    await server.stop(None)
