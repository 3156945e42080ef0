"""Clients that ping stay connected."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from speclen.controller.service import assembly as controller
from speclen.transport import aio
from speclen.worker.service import server as worker

PINGS_OFTEN = [
    ("grpc.keepalive_time_ms", 1000),  # gRPC pings no more often
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
OF_ITS_OWN = ("grpc.use_local_subchannel_pool", 1)  # a connection


def test_pings_end_neither_a_silent_call_nor_an_idle_channel() -> None:
    """By default the third ping, after three seconds, ends a connection."""
    with contextlib.ExitStack() as ending:
        servicer, watches, states = health.HealthServicer(), [], []
        for options in (aio.SERVER_OPTIONS, worker.OPTIONS, controller.OPTIONS):
            server = grpc.server(ThreadPoolExecutor(2), options=options)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
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
