"""Clients that ping stay connected, and those without our stubs find the methods."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from speclen.controller.service import assembly as controller
from speclen.transport import aio
from speclen.worker.service import server as worker
from tests.support.control_fakes import served
from tests.support.http_worker import http_worker

PINGS_OFTEN = [
    ("grpc.keepalive_time_ms", 1000),  # gRPC pings no more often
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
OF_ITS_OWN = ("grpc.use_local_subchannel_pool", 1)  # a connection


def listening(options: list[tuple[str, int]], servicer: health.HealthServicer) -> tuple[grpc.Server, str]:
    server = grpc.server(ThreadPoolExecutor(2), options=options)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


def test_pings_end_neither_a_silent_call_nor_an_idle_channel() -> None:
    """By default the third ping, after three seconds, ends a connection."""
    with contextlib.ExitStack() as ending:
        servicer, watches, states = health.HealthServicer(), [], []
        for options in (aio.SERVER_OPTIONS, worker.OPTIONS, controller.OPTIONS):
            server, address = listening(options, servicer)
            ending.callback(server.stop, None)
            silent = ending.enter_context(grpc.insecure_channel(address, PINGS_OFTEN))
            idle = ending.enter_context(grpc.insecure_channel(address, [*PINGS_OFTEN, OF_ITS_OWN]))
            grpc.channel_ready_future(idle).result(10)
            idle.subscribe(states.append)
            watches.append(health_pb2_grpc.HealthStub(silent).Watch(health_pb2.HealthCheckRequest()))
            next(watches[-1])
        time.sleep(3.3)
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert [next(watch).status for watch in watches] == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
        assert states == [grpc.ChannelConnectivity.READY] * 3, "none was cut off"


# Method: (requests are a stream, responses are a stream).
CONTROL = {"RegisterWorker": (False, False), "ReportStep": (False, False), "StreamReports": (True, True)}
CONTROL |= {"GetLearnedTable": (False, False), "ImportProfile": (False, False)}
GENERATION = {"Generate": (False, True), "Abort": (False, False)}
GENERATION |= {"GetModelInfo": (False, False), "GetServerInfo": (False, False)}


def methods_of(address: str, service: str) -> dict[str, tuple[bool, bool]]:
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        methods = pool.FindServiceByName(f"speclen.v1.{service}").methods
        return {method.name: (method.client_streaming, method.server_streaming) for method in methods}


async def test_reflection_shows_the_methods_that_clients_rely_on(tmp_path: Path) -> None:
    async with served(tmp_path) as controller:
        found = await asyncio.to_thread(methods_of, controller.address, "ControlService")
    assert CONTROL.items() <= found.items()
    with http_worker() as one:
        assert methods_of(one.grpc, "GenerationService").items() >= GENERATION.items()
