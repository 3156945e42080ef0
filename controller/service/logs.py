"""Logs of the controller: lines for people on a terminal, JSON for everything else."""

from __future__ import annotations

import sys
from typing import TextIO

import structlog
from structlog.typing import Processor


def set_up_logs(stream: TextIO = sys.stderr) -> None:
    """Send structlog's events to a stream, with time and level."""
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if stream.isatty():
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=processors, logger_factory=structlog.WriteLoggerFactory(stream), cache_logger_on_first_use=True
    )
