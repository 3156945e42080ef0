"""`speclen worker`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from speclen.console.errors import UserError
from speclen.console.flags import flags_from
from speclen.worker.backends.spinning import set_spins
from speclen.worker.config import WorkerConfig
from speclen.worker.http.settings import check_http


@flags_from(WorkerConfig)
def worker(**settings: Any) -> None:
    """Serve Generate with batched speculative decoding, and report every step to the controller.

    Example: speclen worker --target bundled:target-60m --draft bundled:draft --listen 127.0.0.1:7081
    """
    try:
        config = WorkerConfig(**settings)
        progress(f"starting a worker on {config.listen}")
        check_http(config)
        set_spins()  # before torch is imported, which takes seconds
        from speclen.worker.http.server import http_front
        from speclen.worker.service.server import serve

        asyncio.run(serve(config, progress, http_front))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
