"""Logs of both servers: lines for people on a terminal, JSON for everything else, to one stream and in UTC."""

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
    """Send structlog's events, and the records of Python's own logging, to a stream, with time and level.

    level: the least important that is shown, one of LEVELS. Raises ValueError for another.
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
    # Foreign records (gRPC's, transformers') take the same way as ours; of them only what somebody should act on.
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
    """Lets one event of a kind through per interval, with the number of those before it: callers must not fill a disk."""

    def __init__(self, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}  # kind: when it was let through, and how many were not since

    def pass_on(self, kind: str) -> int | None:
        """None for an event to be left out, else how many of its kind were left out before it. Few kinds only."""
        now = self._clock()
        at, left_out = self._last.get(kind, (float("-inf"), 0))
        if now - at < self._interval_s:
            self._last[kind] = at, left_out + 1
            return None
        self._last[kind] = now, 0
        return left_out


class ForeignFilter(logging.Filter):
    """Of what another library logs at one place of its code, one record every some seconds, with how many were left out.

    Callers can have gRPC and uvicorn log a line for every message that is none, gRPC's with a traceback of its own code.
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
