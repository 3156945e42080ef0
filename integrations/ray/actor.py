"""The controller as one named, detached actor: the first caller creates it, Ray keeps it alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from speclen.integrations.ray.hosting import HostedController
from speclen.integrations.ray.settings import FleetConfig
from speclen.process.logs import set_up_logs

NAME, NAMESPACE = "speclen-controller", "speclen"
ASK_S = 10.0
LOOPBACK = "127.0.0.1"


class ControllerActor:
    """Holds the controller of a fleet. If it dies, Ray creates it again, unless it was killed."""

    def __init__(self) -> None:
        set_up_logs()
        self._hosted = HostedController()

    async def address(self, config: FleetConfig) -> str:
        """Address of the service, which is started as configured if necessary. Raises ValueError if it cannot start."""
        return await self._hosted.address(config.controller_config(host_of_controller(config), os.environ))

    async def stop(self) -> None:
        await self._hosted.stop()


def controller_of() -> Any:
    """Handle of the fleet's controller, which is created if there is none, preferably on the calling node.

    The database is on that node. Ray moves the controller to another machine only if that node is gone.
    """
    place = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"name": NAME, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    return ray.remote(ControllerActor).options(**options, num_cpus=0, scheduling_strategy=place).remote()


def host_of_controller(config: FleetConfig) -> str:
    """Host to listen on: the configured one; loopback if nothing protects it and there is one machine; else the node's."""
    alone = config.controller_cert is None and not config.insecure and is_one_machine()
    return config.controller_host or (LOOPBACK if alone else ray.util.get_node_ip_address())


def is_one_machine() -> bool:
    return len({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}) == 1


async def find_controller(config: FleetConfig) -> str:
    """Current address of the controller. Raises Ray's errors while it restarts, and ValueError if it cannot start."""
    handle = await asyncio.to_thread(controller_of)
    async with asyncio.timeout(ASK_S):  # not wait_for: Python 3.11's forgets that it was cancelled
        return str(await handle.address.remote(config))


def present_controller() -> Any:
    """Handle of the cluster's controller; None if there is none."""
    try:
        return ray.get_actor(NAME, NAMESPACE)
    except ValueError:
        return None


def end_controller(timeout_s: float = 20.0) -> None:
    """Let the controller commit, then end its actor permanently. Does nothing if there is no controller."""
    handle = present_controller()
    if handle is None:
        return
    with contextlib.suppress(ray.exceptions.RayError):  # it is already dying, or it has to be killed
        ray.get(handle.stop.remote(), timeout=timeout_s)
    ray.kill(handle)
