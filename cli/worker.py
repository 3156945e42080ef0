"""`speclen worker`."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import Any

from speclen.cli.support.client import check_controller
from speclen.cli.support.database import HERE
from speclen.cli.support.flags import flags_from
from speclen.cli.support.output import UserError, say
from speclen.process.embedded import EMBEDDED, serving
from speclen.process.supervision import PartFailedError
from speclen.records import Limits
from speclen.worker.backends import set_spins
from speclen.worker.config import WorkerConfig
from speclen.worker.models.naming import check_names
from speclen.worker.profiling.file import table_from_file
from speclen.worker.reporting.control_stream import controllers


@flags_from(WorkerConfig)
def worker(**settings: Any) -> None:
    """Serve Generate with batched speculative decoding, and report every step to the controller.

    Example: speclen worker --target bundled:target-60m --draft bundled:draft --listen 127.0.0.1:7081
    """
    try:
        config = WorkerConfig(**settings)
        if config.controller == EMBEDDED and (found := serving(HERE)):
            say(f"joining the controller of {HERE}, which runs at {found.address}")
            config = replace(config, controller=found.address)
        check_surroundings(config)
        say(f"starting a worker on {config.listen}")
        set_spins()  # takes effect only before torch is imported
        from speclen.process.logs import set_up_logs
        from speclen.worker.frontend.worker_server import serve

        set_up_logs(config.log_level)
        if config.http_listen:
            from speclen.worker.http.http_server import http_front

            asyncio.run(serve(config, say, http_front))
        else:
            asyncio.run(serve(config, say))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    except PartFailedError:  # already logged
        sys.stderr.flush()
        os._exit(1)  # does not wait for threads, which may hang


def check_surroundings(config: WorkerConfig) -> None:
    """Check everything that can be checked before the slow import of torch. Raises ValueError, OSError, UserError."""
    check_names(config.target, config.draft)
    if config.profile is not None:
        table_from_file(config.profile, Limits(config.max_batch_size, config.max_length))
    config.credentials(), config.interceptors()
    config.check_listening()
    for address in controllers(config.controller):
        check_controller(config.controller_security(), address, config.run_id)
