"""`speclen controller`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import typer

from speclen.launch.errors import UserError


def controller(
    listen: str = typer.Option("127.0.0.1:7070", help="Address of the service, HOST:PORT; port 0 for a free one."),
    db: Path | None = typer.Option(None, help="Database file; default: speclen.db in the data directory."),
    data_dir: Path = typer.Option(Path(".speclen"), help="Folder of the database."),
    metrics_listen: str = typer.Option("", help="Address of the Prometheus page; empty for none."),
    policy: str = typer.Option("adaptive", help="adaptive, profile, fixed:K, none, or one of `bench policy`'s."),
    seed: int = typer.Option(0, min=0, help="Seed of the estimator's random generator."),
    in_memory: bool = typer.Option(False, "--in-memory", help="No database: all is forgotten at the end."),
    commit_interval_s: float = typer.Option(1.0, min=0.001, help="Seconds between commits."),
    keep_reports: int = typer.Option(5_000_000, min=1, help="Raw reports kept at most."),
    keep_days: float = typer.Option(30.0, help="Days for which raw reports are kept."),
    max_streams: int = typer.Option(4096, min=1, help="Streams open at once."),
    max_workers: int = typer.Option(65_536, min=1, help="Workers ever known."),
    max_contexts: int = typer.Option(1024, min=1, help="Contexts ever known."),
    silence_s: float = typer.Option(30.0, help="Seconds after which a stream without messages is ended."),
    drain_timeout_s: float = typer.Option(10.0, min=0, help="Seconds that the last commit has after SIGTERM."),
    move_corrupt_aside: bool = typer.Option(
        False, "--move-corrupt-aside", help="Rename a damaged database and start anew."
    ),
    tls_cert: Path | None = typer.Option(None, help="Certificate chain, PEM."),
    tls_key: Path | None = typer.Option(None, help="Key of the certificate, PEM."),
    tls_client_ca: Path | None = typer.Option(None, help="Clients must show a certificate of this authority, PEM."),
    token_file: Path | None = typer.Option(None, help="File with the bearer token that every call must carry."),
    insecure: bool = typer.Option(
        False, "--insecure", help="Allow an address other than loopback without TLS and authentication."
    ),
) -> None:
    """Learn from the reports of workers which speculation lengths are best, and keep it in SQLite.

    Example: speclen controller --listen 127.0.0.1:7070 --db speclen.db --metrics-listen 127.0.0.1:9090
    """
    options = dict(locals())
    from speclen.controller.config import ControllerConfig  # here, so that --help is quick
    from speclen.controller.service.logs import set_up_logs
    from speclen.controller.service.server import serve

    set_up_logs(sys.stderr)
    try:
        asyncio.run(serve(ControllerConfig(**options), announce))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def announce(line: str) -> None:
    print(line, flush=True)
