"""`speclen controller`."""

from __future__ import annotations

import asyncio
from typing import Any

from speclen.cli.support.flags import flags_from
from speclen.cli.support.output import user_errors
from speclen.controller.config import ControllerConfig
from speclen.process.embedded import detach, end_when_unused


@flags_from(ControllerConfig)
def controller(**settings: Any) -> None:
    """Learn from the reports of workers which arms are best, and keep the result in SQLite.

    Example: speclen controller --listen 127.0.0.1:7070 --db speclen.db --metrics-listen 127.0.0.1:9090
    """
    with user_errors((ValueError, OSError)):
        config = ControllerConfig(**settings)
        serves = detach() if config.embedded else None
        if config.embedded:
            end_when_unused(config.database)
        from speclen.controller.service.controller_server import (
            serve,  # imported here to keep --help and wrong flags fast
        )
        from speclen.process.logs import set_up_logs

        set_up_logs(config.log_level)

        def announce(line: str) -> None:
            print(line, flush=True)
            if serves is not None:
                serves()

        asyncio.run(serve(config, announce))
