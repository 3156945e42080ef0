"""The controller as one named, detached actor: whoever needs it makes it, Ray keeps it alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from speclen.integrations.ray.hosting import HostedController, RefusedError
from speclen.integrations.ray.settings import FleetConfig
from speclen.transport.logs import set_up_logs

NAME, NAMESPACE = "speclen-controller", "speclen"
START_S = 60.0  # for a controller to open its database and serve
ASK_S = 5.0  # for one that serves to say where
REPLACE_S = 5.0  # between two controllers that could not start: each is a process anew


class ControllerActor:
    """Holds the controller of a fleet. After its death Ray makes it anew with the same arguments, until it is killed."""

    def __init__(self, config: FleetConfig, host: str) -> None:
        set_up_logs()
        again = ray.get_runtime_context().was_current_actor_reconstructed
        own = config.controller_host or (ray.util.get_node_ip_address() if host != LOOPBACK else host)
        self._hosted: HostedController | None = None
        self._refused = ""  # raised by `address`: what a constructor raises comes to nobody as what it is
        try:
            told = config.controller_config(own, os.environ)
        except ValueError as error:
            self._refused = str(error)
            return
        self._hosted = HostedController(told, again)
        self._hosted.start()

    def address(self, timeout_s: float = START_S) -> str:
        """Address of the service. Raises RefusedError if it never will serve, ValueError if not in time."""
        if self._hosted is None:
            raise RefusedError(self._refused)
        return self._hosted.address(timeout_s)

    def stop(self) -> None:
        if self._hosted is not None:
            self._hosted.stop()


LOOPBACK = "127.0.0.1"


def controller_of(config: FleetConfig) -> Any:
    """A handle of the fleet's controller, made if there is none. It prefers the node where it was first asked for.

    There its database is. Another machine takes it only when that one is gone.
    """
    place = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(ControllerActor).options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=8,
        num_cpus=0,
        scheduling_strategy=place,
    )
    return actor.remote(config, host_of_controller(config))


def host_of_controller(config: FleetConfig) -> str:
    """Host to listen on by default: loopback, or "" for the address of its node.

    It keeps what it is told now, whoever joins later: so it is on loopback only where nothing protects it.
    """
    return host_of_cluster() if config.controller_cert is None and not config.insecure else ""


def host_of_cluster() -> str:
    """Loopback where all nodes are this machine, since then nobody else has to reach the controller."""
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if len(machines) == 1 else ""


async def find_controller(config: FleetConfig) -> str:
    """The controller's present address. Raises Ray's errors while it starts again, RefusedError if it cannot start."""
    handle = await asyncio.to_thread(controller_of, config)
    try:
        async with asyncio.timeout(2 * ASK_S):  # not wait_for: Python 3.11's forgets that it was cancelled
            return str(await handle.address.remote(ASK_S))
    except RefusedError:
        await asyncio.sleep(REPLACE_S)
        await asyncio.to_thread(ray.kill, handle)  # or it would be given to whoever asks; the next may be told better
        raise


def present_controller() -> Any:
    """A handle of the controller that is on the cluster; None where there is none."""
    try:
        return ray.get_actor(NAME, NAMESPACE)
    except ValueError:
        return None


def end_controller(timeout_s: float = 20.0) -> None:
    """Let the controller commit, and end its actor for good. None at all is no error."""
    handle = present_controller()
    if handle is None:
        return
    with contextlib.suppress(ray.exceptions.RayError):  # it is dying, or has to be killed
        ray.get(handle.stop.remote(), timeout=timeout_s)
    ray.kill(handle)
