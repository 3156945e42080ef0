"""Settings of a fleet on Ray: flags of `speclen up --ray`, or KEY=VALUE of `serve run`. Does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from speclen.controller.config import ControllerConfig
from speclen.process.credentials import ServerSecurity
from speclen.process.settings import check_bounds, setting, settings_of
from speclen.worker.config import WorkerConfig

# Settings of a worker that Ray decides, or that its proxies take over.
NOT_OF_WORKERS = (
    *("listen", "controller", "http_listen", "metrics_listen", "worker_id", "run_id"),
    *("tls_cert", "tls_key", "tls_client_ca", "read_token_file", "controller_cert", "controller_key"),
    "insecure",
)
OF_WORKERS = set(settings_of(WorkerConfig)) - set(NOT_OF_WORKERS)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """One controller and identical workers. Raises ValueError with one sentence that names the setting.

    worker: settings of `speclen worker` by name. A node may override them by SPECLEN_WORKER_* in its environment.
    """

    workers: int = setting(1, "Workers that always run.", least=1, most=1024)
    max_workers: int = setting(
        0, "With Ray: workers at most, added and removed by load; 0: always --workers.", least=0, most=1024
    )
    cpus_per_worker: float = setting(1.0, "With Ray: CPUs for each worker.", least=0)
    gpus_per_worker: float = setting(0.0, "With Ray: GPUs for each worker.", least=0)
    data_dir: Path = setting(Path(".speclen"), "Folder of the controller's database, on the machine that it runs on.")
    controller_host: str = setting("", "Where the controller listens; default: the address of its node.")
    controller_port: int = setting(7070, "Port of the controller; 0: any free port.", least=0, most=65_535)
    metrics_listen: str = setting("", "Address of the controller's Prometheus page, on its machine; empty for none.")
    controller_cert: Path | None = setting(None, "With Ray: certificate chain of the controller, PEM.")
    controller_key: Path | None = setting(None, "Key of that certificate, PEM.")
    insecure: bool = setting(
        False, "With Ray: let other machines in without a token, and reach the controller without TLS."
    )
    worker: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_workers and self.max_workers < self.workers:
            raise ValueError(f"--max-workers {self.max_workers} is less than --workers {self.workers}: give more, or 0")
        if (self.controller_cert is None) != (self.controller_key is None):
            raise ValueError("--controller-cert and --controller-key belong together: give both or none")
        if self.metrics_listen:
            security = ServerSecurity(self.controller_cert, self.controller_key, insecure=self.insecure)
            security.check_exposure("--metrics-listen", self.metrics_listen, tokens=False)
        for name in self.worker:
            if name not in OF_WORKERS:
                raise ValueError(f"{name} is no setting of workers on Ray: see `speclen worker --help`")
        self.worker_config({})

    def worker_config(self, environment: Mapping[str, str]) -> WorkerConfig:
        """Settings of a worker on a node with this environment. Raises ValueError naming setting and value."""
        told = {name: environment.get(f"SPECLEN_WORKER_{name.upper()}") for name in OF_WORKERS}
        of_node = {name: parse(WorkerConfig, name, text) for name, text in told.items() if text}
        return WorkerConfig(**{**self.worker, **of_node, "controller": ""})

    def controller_config(self, host: str, environment: Mapping[str, str]) -> ControllerConfig:
        """Settings of the controller on a node with this address and environment.

        Its token is the one that workers on that node send. Raises ValueError if anyone could call it.
        """
        address = f"[{host}]" if ":" in host else host
        return ControllerConfig(
            listen=f"{address}:{self.controller_port}",
            data_dir=self.data_dir,
            metrics_listen=self.metrics_listen,
            tls_cert=self.controller_cert,
            tls_key=self.controller_key,
            token_file=self.worker_config(environment).controller_token_file,
            insecure=self.insecure,
        )


def fleet_from(arguments: Mapping[str, Any]) -> FleetConfig:
    """The configuration given by KEY=VALUE arguments. Raises ValueError naming what is wrong."""
    fleet: dict[str, Any] = {}
    worker: dict[str, Any] = {}
    for key, value in arguments.items():
        name = key.replace("-", "_")
        if name in settings_of(FleetConfig):
            fleet[name] = parse(FleetConfig, name, value)
        elif name in OF_WORKERS:
            worker[name] = parse(WorkerConfig, name, value)
        else:
            raise ValueError(f"{key} is no setting of a fleet on Ray: see `speclen up --help`")
    return FleetConfig(**fleet, worker=worker)


def parse(config: type, name: str, value: Any) -> Any:
    """A setting's value by its type. Raises ValueError naming it."""
    try:
        return TypeAdapter(get_type_hints(config)[name]).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{name} is {value!r}: {error.errors()[0]['msg']}") from None
