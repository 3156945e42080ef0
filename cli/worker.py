"""`speclen worker`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import typer

from cli.errors import UserError
from cli.model_options import BACKEND, DEVICE, DRAFT, DTYPE, TARGET
from worker.spinning import set_spins


def worker(
    listen: str = typer.Option("127.0.0.1:7080", help="Address of the Generate service, HOST:PORT."),
    controller: str = typer.Option("127.0.0.1:7070", help="Address of the controller; empty for none."),
    target: str = TARGET,
    draft: str = DRAFT,
    device: str = DEVICE,
    dtype: str = DTYPE,
    backend: str = BACKEND,
    max_batch_size: int = typer.Option(32, min=1, max=4096, help="Rows decoding in one step."),
    max_length: int = typer.Option(8, min=0, max=64, help="Largest speculation length."),
    max_waiting: int = typer.Option(256, min=0, help="Requests that may wait; one more is refused at once."),
    max_kv_tokens: int = typer.Option(0, min=0, help="Tokens of KV cache over all rows; 0: as many as fit."),
    policy: str = typer.Option("adaptive", help="adaptive, profile, fixed:K or none."),
    profile: Path | None = typer.Option(None, help="Profile as JSON, to start from or for --policy profile."),
    quick_profile_s: float = typer.Option(
        0.0,
        min=0,
        help="Measure a profile for this many seconds first, if the controller knows nothing of this context.",
    ),
    worker_id: str = typer.Option("", help="Stable name in the fleet; default: host name and port."),
    threads: int = typer.Option(
        0, min=0, help="CPU threads for the models; 0: by model size, fewer while other processes want the cores."
    ),
    metrics_listen: str = typer.Option("", help="Address of the Prometheus page; empty for none."),
    drain_timeout_s: float = typer.Option(30.0, min=0, help="Seconds that running requests have after SIGTERM."),
    tls_cert: Path | None = typer.Option(None, help="Certificate chain of this worker, PEM."),
    tls_key: Path | None = typer.Option(None, help="Key of the certificate, PEM."),
    tls_client_ca: Path | None = typer.Option(None, help="Clients must show a certificate of this authority, PEM."),
    token_file: Path | None = typer.Option(None, help="File with the bearer token that every call must carry."),
    insecure: bool = typer.Option(
        False, "--insecure", help="Allow an address other than loopback without TLS and authentication."
    ),
    controller_ca: Path | None = typer.Option(None, help="Authority of the controller's certificate, PEM."),
    controller_cert: Path | None = typer.Option(None, help="Certificate to show to the controller, PEM."),
    controller_key: Path | None = typer.Option(None, help="Key of that certificate, PEM."),
    controller_token_file: Path | None = typer.Option(None, help="File with the controller's bearer token."),
) -> None:
    """Serve Generate with batched speculative decoding, and report every step to the controller.

    Example: speclen worker --target bundled:target-60m --draft bundled:draft --listen 127.0.0.1:7081
    """
    options = dict(locals())
    progress(f"starting a worker on {listen}")
    set_spins()  # before torch is imported
    from worker.config import WorkerConfig  # here, since torch takes seconds to import
    from worker.server import serve

    try:
        asyncio.run(serve(WorkerConfig(**options), progress))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
