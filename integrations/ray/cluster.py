"""`speclen up --ray`: joins a cluster, or starts one on this machine, and runs the fleet there until it is stopped."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

from speclen.integrations.ray.actor import (
    NAME,
    NAMESPACE,
    controller_of,
    end_controller,
    is_one_machine,
    present_controller,
)
from speclen.integrations.ray.settings import FleetConfig
from speclen.process.settings import check_free, is_loopback, split_address

APPLICATION = "speclen"
START_S = 60.0  # until a controller has opened its database and serves
SERVICERS = [
    "speclen.v1.generation_pb2_grpc.add_GenerationServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
Say = Callable[[str], None]


def join(address: str) -> None:
    """Connect to the cluster at HOST:PORT. "auto": to the one on this machine, which is started if there is none.

    Raises ValueError with one sentence if there is no cluster at the address.
    """
    quiet = {"namespace": "speclen", "log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        if address != "auto":
            raise ValueError(
                f"there is no Ray cluster at {address}: give the address that `ray start` printed"
            ) from error
        ray.init(address="local", include_dashboard=False, **quiet)


@contextlib.contextmanager
def fleet(config: FleetConfig, listen: str, http_listen: str, say: Say) -> Iterator[FleetConfig]:
    """Run a fleet for the duration of the block. Yields its configuration, including the token that callers need.

    Serve and the controller start here, and end with the block. listen: address for gRPC, for which Ray always uses all
    interfaces; http_listen: for HTTP. Raises ValueError or OSError with one sentence if the fleet cannot run.
    """
    check_unused()
    check_addresses(config, listen, http_listen)
    config = protected(config)
    try:
        start_proxies(listen, http_listen)
        # The controller starts first, so that errors of its database are reported before a worker loads a model.
        say(f"the controller serves on {start_controller(config)}")
        say(f"starting {config.workers} workers")
        deploy(config)
        yield config
    finally:
        try:
            serve.shutdown()
        finally:  # the controller is detached: it must end even if the code above was interrupted
            end_controller()


def protected(config: FleetConfig) -> FleetConfig:
    """Add a token for gRPC callers, since Ray listens on all interfaces. It is created here, where all nodes can read it."""
    if config.insecure or config.worker.get("token_file"):
        return config
    if not is_one_machine():
        raise ValueError(
            "Ray's proxy listens to other machines: give --token-file, a path that is the same on every node, or accept "
            "the risk with --insecure"
        )
    path = (config.data_dir / "ray.token").absolute()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)  # before there is anything to read
        path.write_text(secrets.token_hex(32) + "\n")
    return replace(config, worker={**config.worker, "token_file": path})


def check_unused() -> None:
    """Raise ValueError if the cluster already runs Serve or a controller, since both would end with this fleet.

    A Serve that already runs has other ports, and with two applications every gRPC call must name its application.
    """
    status = serve.status()
    if status.proxies or status.applications:
        names = ", ".join(sorted(status.applications)) or "none"
        raise ValueError(
            f"Ray Serve runs on this cluster already (applications: {names}): deploy speclen there with `serve deploy`, "
            "or end all that it serves with `serve shutdown`"
        )
    if present_controller() is not None:
        raise ValueError(
            f"a controller is on this cluster already, the actor {NAME}: end it with "
            f"`python -c \"import ray; ray.init('auto'); ray.kill(ray.get_actor('{NAME}', '{NAMESPACE}'))\"`"
        )


def check_addresses(config: FleetConfig, listen: str, http_listen: str) -> None:
    """Raise ValueError if an address is malformed, or if tokens and texts would arrive there unencrypted, and OSError if
    a port is taken.
    """
    host, _ = split_address("--http-listen", http_listen)
    if not is_loopback(host) and not config.insecure:
        raise ValueError(
            f"--http-listen {http_listen} is open to other machines, in plain HTTP: use 127.0.0.1 with a proxy that has "
            "TLS before it, or accept the risk with --insecure"
        )
    _, port = split_address("--listen", listen)
    check_free("--listen", f"0.0.0.0:{port}")
    check_free("--http-listen", http_listen)


def start_proxies(listen: str, http_listen: str) -> None:
    """Start Ray Serve with both proxies on the head node."""
    _, port = split_address("--listen", listen)
    host, http_port = split_address("--http-listen", http_listen)
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=http_port),
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=SERVICERS),
    )


def start_controller(config: FleetConfig) -> str:
    """Start the controller and return its address once it serves. Raises ValueError with the controller's sentence."""
    try:
        return str(ray.get(controller_of().address.remote(config), timeout=START_S))
    except ray.exceptions.RayTaskError as error:
        raise ValueError(str(error.cause or error).strip().splitlines()[-1]) from error


def deploy(config: FleetConfig) -> None:
    """Run the application and wait until all workers serve. Raises ValueError if Serve gives up."""
    from speclen.integrations.ray.application import (
        application,
    )  # imports torch, which takes seconds

    try:
        serve.run(application(config), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"Ray Serve could not start the workers: {lines[-1]}") from error
