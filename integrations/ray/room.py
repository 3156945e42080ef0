"""Check that there is a cluster, and room in it, before anything starts. Knows of Ray only the shape of its nodes."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from speclen.integrations.ray.settings import FleetConfig
from speclen.transport.address import split_address


def check_room(config: FleetConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError where fewer workers fit than always run. nodes: as `ray.nodes()` gives them."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    fitting = sum(workers_on(node, config) for node in alive)
    if fitting >= config.workers:
        return
    wanted = f"{config.cpus_per_worker:g} CPUs"
    if config.gpus_per_worker:
        wanted += f" and {config.gpus_per_worker:g} GPUs"
    have = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in alive)
    raise ValueError(
        f"the cluster has room for {fitting} of {config.workers} workers of {wanted} each (its nodes: {have}): add nodes, "
        "or give less with --workers, --cpus-per-worker or --gpus-per-worker"
    )


def workers_on(resources: Mapping[str, float], config: FleetConfig) -> int:
    """Workers that fit on one node: none is spread over two."""
    wanted = {"CPU": config.cpus_per_worker, "GPU": config.gpus_per_worker}
    fits = [int(resources.get(name, 0.0) / amount + 1e-9) for name, amount in wanted.items() if amount]
    return min(fits, default=config.most_workers)


def check_reachable(address: str) -> None:
    """Raises ValueError where nothing listens: Ray itself would try for a minute."""
    host, port = split_address("--ray", address.removeprefix("ray://"))
    try:
        socket.create_connection((host, port), timeout=3.0).close()
    except OSError as error:
        raise ValueError(
            f"there is no Ray cluster at {address} ({error.strerror or error}): start one with `ray start --head`, or "
            "leave the address away"
        ) from error
