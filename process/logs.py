"""Logging of both servers to one stream: readable lines on a terminal, else JSON. Times are UTC."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import Processor

LEVELS = ("debug", "info", "warning", "error")


def set_up_logs(level: str = "info", stream: TextIO = sys.stderr) -> None:
    """Send structlog's events and the records of Python's `logging` to a stream, with time and level.

    level: the least severe one that is logged, of LEVELS. Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"--log-level {level!r} is unknown: use {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if stream.isatty():
        last: list[Processor] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    least = getattr(logging, level.upper())
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    # Records of other libraries (gRPC, transformers) are formatted like ours, but logged from warnings on only.
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    handler.addFilter(ForeignFilter())
    logging.basicConfig(handlers=[handler], level=max(least, logging.WARNING), force=True)
    logging.getLogger("speclen").setLevel(least)


class Sparse:
    """Rate limit for logging: lets one event of each kind through per interval, so that callers cannot fill a disk."""

    def __init__(self, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[
            str, tuple[float, int]
        ] = {}  # by kind: time of the last event logged, and number dropped since

    def pass_on(self, kind: str) -> int | None:
        """None if this event is to be dropped, else the number dropped before it. kind: one of a few."""
        now = self._clock()
        at, left_out = self._last.get(kind, (float("-inf"), 0))
        if now - at < self._interval_s:
            self._last[kind] = at, left_out + 1
            return None
        self._last[kind] = now, 0
        return left_out


class ForeignFilter(logging.Filter):
    """Rate limit for records of other libraries, by the line of code that logs them.

    Callers can make gRPC and uvicorn log a line for every malformed message, gRPC with a traceback of its own code.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sparse = Sparse()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "speclen":
            return True
        if (left_out := self._sparse.pass_on(f"{record.name} {record.pathname}:{record.lineno}")) is None:
            return False
        if left_out:
            record.unlogged_before = left_out
        if record.exc_info and record.exc_info[0] is not None and record.exc_info[0].__name__ == "DecodeError":
            record.exc_info = record.exc_text = None
        return True
