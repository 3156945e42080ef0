"""Our log in vLLM's: one line an event, by vLLM's own logger."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

from speclen.integrations.vllm.settings import as_variables

LOGGER = "vllm.speclen"  # below vLLM's own, whose handler and level are thereby ours


def set_up_logs() -> None:
    """Send our events to vLLM's log, unless this process has configured structlog already."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[structlog.processors.format_exc_info, as_line],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=lambda *_: logging.getLogger(LOGGER),
    )


def as_line(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """ "speclen: lengths changed (version=3, lengths={…})", and a traceback below where there is one."""
    sentence, trace = event.pop("event"), event.pop("exception", "")
    values = ", ".join(f"{key}={value}" for key, value in event.items())
    line = as_variables(f"speclen: {sentence}{f' ({values})' if values else ''}")
    return f"{line}\n{trace}" if trace else line
