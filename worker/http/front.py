"""The HTTP front as the worker sees it: checked before the models are loaded, then served."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import CollectorRegistry

from speclen.transport.address import check_exposure, check_free
from speclen.transport.credentials import read_file
from speclen.worker.config import WorkerConfig
from speclen.worker.http.app import Front, create_app
from speclen.worker.http.server import api_key_of, listen, make_server, serving
from speclen.worker.service.async_engine import AsyncEngine


def check_http(config: WorkerConfig) -> None:
    """Raise ValueError or OSError for settings that cannot work, before anything slow starts."""
    if not config.http_listen:
        return
    security = config.http_security()
    check_exposure("--http-listen", config.http_listen, security.encrypted, security.authenticated, config.insecure)
    security.credentials()
    api_key_of(security)
    read_template(config.chat_template)
    check_free("--http-listen", config.http_listen)


@contextlib.asynccontextmanager
async def http_front(
    config: WorkerConfig, engine: AsyncEngine, page: CollectorRegistry, healthy: Callable[[], bool]
) -> AsyncIterator[str]:
    """Serve for the length of the block, if an address is configured; the value: one line about it.

    page: of /metrics. healthy: whether the worker can serve. Raises as `check_http`.
    """
    if not config.http_listen:
        yield ""
        return
    front = Front(
        engine,
        config.served_model_name or config.target,
        installed_version(),
        page,
        healthy,
        read_template(config.chat_template),
        int(time.time()),
    )
    bound = listen(config.http_listen)
    async with serving(make_server(create_app(front), config.http_security()), bound):
        scheme, host = "https" if config.tls_cert else "http", config.http_listen.rpartition(":")[0]
        yield f"worker serving {scheme}://{host}:{bound.getsockname()[1]}/v1"


def read_template(path: Path | None) -> str | None:
    return None if path is None else read_file("--chat-template", path).decode("utf-8", errors="replace")


def installed_version() -> str:
    try:
        return version("speclen")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
