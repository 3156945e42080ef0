"""Settings of the HTTP front, checked before anything slow is imported or loaded."""

from __future__ import annotations

from pathlib import Path

from speclen.transport.address import check_exposure, check_free
from speclen.transport.credentials import read_file
from speclen.worker.config import WorkerConfig

KEY_FLAG = "--api-key-file"


def check_http(config: WorkerConfig) -> None:
    """Raise ValueError or OSError for settings that cannot work, before anything slow starts."""
    if not config.http_listen:
        return
    security = config.http_security()
    check_exposure("--http-listen", config.http_listen, security.encrypted, security.authenticated, config.insecure)
    security.credentials()
    security.keyring(KEY_FLAG)
    read_template(config.chat_template)
    check_free("--http-listen", config.http_listen)


def read_template(path: Path | None) -> str | None:
    return None if path is None else read_file("--chat-template", path).decode("utf-8", errors="replace")
