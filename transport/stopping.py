"""Requests to stop a server."""

from __future__ import annotations

import asyncio
import os
import signal


def stop_event() -> asyncio.Event:
    """Set by SIGTERM and SIGINT; a second signal ends the process at once."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        if event.is_set():
            os._exit(130)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return event
