"""The application of Ray Serve: workers as replicas behind one address, for gRPC and for HTTP.

serve run speclen.integrations.ray:app workers=2 target=bundled:target-60m
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import ray
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.config import AutoscalingConfig
from ray.serve.grpc_util import RayServegRPCContext
from starlette.types import ASGIApp

from speclen.integrations.ray.actor import find_controller
from speclen.integrations.ray.serving import ServedWorker
from speclen.integrations.ray.settings import FleetConfig, fleet_from
from speclen.process.logs import set_up_logs
from speclen.v1 import generation_pb2 as pb

HEALTH_PERIOD_S = 2.0
LOOK_BACK_S = 10.0  # over which load is averaged before workers are added
QUEUE_SHARE = 0.25  # of a worker's slots: requests that wait in the worker itself, so that a free slot is taken at once
SERVED: dict[str, ServedWorker] = {}  # the one worker of this process, under its Serve name


def front() -> ASGIApp:
    """The HTTP front of `speclen worker --http-listen`. Serve calls this after the worker of this process was created."""
    (worker,) = SERVED.values()
    return worker.http


@serve.ingress(front)
class Worker:
    """One replica. It has the methods of the protocol, which the gRPC proxy calls by name."""

    async def __init__(self, config: FleetConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        set_up_logs()
        context, host = serve.get_replica_context(), ray.util.get_node_ip_address()
        told = replace(
            config.worker_config(os.environ),
            listen=f"{host}:0",
            worker_id=f"ray:{host}:{context.replica_id.unique_id}",
            insecure=config.insecure,
        )
        self._worker = await ServedWorker.start(told, lambda: find_controller(config))
        SERVED[told.worker_id] = self._worker
        self._end = asyncio.create_task(self._worker.until_failed())

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        async for message in self._worker.generate(request, grpc_context):
            yield message

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerInfoResponse:
        """State of the worker with the fewest requests."""
        return await self._worker.ask("GetServerInfo", request, grpc_context)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelInfoResponse:
        return await self._worker.ask("GetModelInfo", request, grpc_context)

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:  # noqa: N802
        """Not supported: the call would reach one worker, and rarely the right one."""
        grpc_context.set_code(StatusCode.UNIMPLEMENTED)
        grpc_context.set_details("behind Ray's proxy a request is ended by cancelling its call")
        raise NotImplementedError("Abort")

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        """The call Check of grpc.health.v1. That a worker answers means that the fleet serves."""
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def check_health(self) -> None:
        self._worker.supervisor.check()

    async def __del__(self) -> None:
        await self._worker.stop()


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for KEY=VALUE arguments. Raises ValueError naming what is wrong."""
    return application(fleet_from(arguments))


def application(config: FleetConfig) -> serve.Application:
    """The application. Requests that exceed a worker's slots wait at the proxies, and the first free worker takes them."""
    told = config.worker_config({})
    ahead = max(1, round(QUEUE_SHARE * told.max_batch_size))
    sizes: dict[str, Any] = {"num_replicas": config.workers}
    if config.max_workers > config.workers:
        sizes = {"autoscaling_config": scaling(config, told.max_batch_size)}
    deployment = serve.deployment(
        Worker,
        name="Worker",
        max_ongoing_requests=told.max_batch_size + ahead,
        max_queued_requests=told.max_waiting,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=told.drain_timeout_s,
        ray_actor_options={"num_cpus": config.cpus_per_worker, "num_gpus": config.gpus_per_worker},
        **sizes,
    )
    return deployment.bind(config)


def scaling(config: FleetConfig, rows: int) -> AutoscalingConfig:
    """Autoscaling: workers are added while running and waiting requests fill all slots, and removed when they fill fewer."""
    return AutoscalingConfig(
        min_replicas=config.workers,
        max_replicas=config.max_workers,
        target_ongoing_requests=max(1.0, 0.75 * rows),
        upscale_delay_s=LOOK_BACK_S,
        downscale_delay_s=60.0,
        look_back_period_s=LOOK_BACK_S,
    )
