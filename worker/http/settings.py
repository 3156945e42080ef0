"""Settings of the HTTP front, checked before anything slow is imported or loaded."""

from __future__ import annotations

from pathlib import Path

from speclen.transport.address import check_exposure, check_free
from speclen.transport.credentials import ServerSecurity, read_file, read_token
from speclen.worker.config import WorkerConfig


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


def api_key_of(security: ServerSecurity) -> str | None:
    """The key that callers must show; None when anybody may call. Raises ValueError when it cannot be read."""
    return None if security.token_file is None else read_token("--api-key-file", security.token_file)


def read_template(path: Path | None) -> str | None:
    return None if path is None else read_file("--chat-template", path).decode("utf-8", errors="replace")
