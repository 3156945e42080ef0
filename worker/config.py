"""Settings of a worker, with defaults that work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from transport.credentials import ClientSecurity, ServerSecurity

POLICY = re.compile(r"adaptive|profile|none|fixed:(\d{1,2})")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that `speclen worker` can be told."""

    listen: str = "127.0.0.1:7080"  # address of GenerationService
    controller: str = "127.0.0.1:7070"  # address of the controller; empty: none
    target: str = "bundled:target"  # directory, hub id or bundled name
    draft: str = "bundled:draft"  # the same; empty: no draft, plain decoding
    device: str = "auto"  # CUDA where there is one, else CPU
    dtype: str = "auto"  # see worker/models.py
    backend: str = "auto"  # auto, torch or openvino, see worker/engine_config.py
    max_batch_size: int = 32  # rows decoding in one step
    max_length: int = 8  # largest speculation length
    max_waiting: int = 256  # requests that may queue; one more is refused at once
    max_kv_tokens: int = 0  # tokens of KV over all rows; 0: what the engine finds fit
    policy: str = "adaptive"  # adaptive, profile, fixed:K or none
    profile: Path | None = None  # profile as JSON, the table to start with and that of policy `profile`
    quick_profile_s: float = 0.0  # unknown to the controller: measure this long before serving; 0: learn while serving
    worker_id: str = ""  # stable name; empty: host name and port
    threads: int = 0  # torch threads on CPU; 0: see worker/threads.py
    stream_interval_s: float = 0.02  # chunks of a stream are gathered for this long
    drain_timeout_s: float = 30.0  # SIGTERM: running requests have this long to finish
    metrics_listen: str = ""  # HOST:PORT of the Prometheus page; empty: none
    tls_cert: Path | None = None  # the worker's certificate chain, PEM
    tls_key: Path | None = None  # its key, PEM
    tls_client_ca: Path | None = None  # clients must show a certificate that this one signed, PEM
    token_file: Path | None = None  # file with the bearer token that every call must carry
    insecure: bool = False  # allow an address other than loopback without encryption and authentication
    controller_ca: Path | None = None  # authority of the controller's certificate, PEM; None: no TLS
    controller_cert: Path | None = None  # certificate to show to the controller, PEM
    controller_key: Path | None = None  # its key, PEM
    controller_token_file: Path | None = None  # file with the controller's bearer token

    def server_security(self) -> ServerSecurity:
        """Raises ValueError for flags that do not belong together."""
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, self.token_file)

    def controller_security(self) -> ClientSecurity:
        """How the controller is reached."""
        return ClientSecurity(self.controller_ca, self.controller_cert, self.controller_key, self.controller_token_file)


def parse_policy(policy: str) -> tuple[str, int | None]:
    """Kind and, for a fixed length, the length. Raises ValueError naming the value."""
    match = POLICY.fullmatch(policy)
    if match is None:
        raise ValueError(f"--policy {policy!r} is unknown: use adaptive, profile, none or fixed:K with K a number")
    if match.group(1) is not None:
        return "fixed", int(match.group(1))
    return policy, None
