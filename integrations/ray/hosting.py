"""Runs a controller inside a Ray process, on its event loop."""

from __future__ import annotations

import asyncio
import contextlib

from speclen.controller.config import ControllerConfig
from speclen.controller.service.controller_server import Running, give_up, quiet_interpreter, running, show_page
from speclen.store.connection import StoreError


class HostedController:
    """Serves from the first successful call of `address` until `stop`. A failure while serving ends the process."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._address = ""
        self._serving = contextlib.AsyncExitStack()

    async def address(self, config: ControllerConfig) -> str:
        """Address of the service, started if necessary. Raises ValueError if it cannot start; callers may try again."""
        async with self._starting:
            if not self._address:
                try:
                    self._address = await self._start(config)
                except (OSError, StoreError) as error:
                    raise ValueError(str(error) or type(error).__name__) from error
            return self._address

    async def _start(self, config: ControllerConfig) -> str:
        quiet_interpreter()
        async with contextlib.AsyncExitStack() as stack:
            controller = await stack.enter_async_context(running(config))
            show_page(controller, config)  # for the rest of the process
            controller.supervisor.watch_loop()
            failing = asyncio.create_task(until_failed(controller))
            stack.callback(failing.cancel)
            self._serving = stack.pop_all()
        return f"{config.listen.rpartition(':')[0]}:{controller.port}"

    async def stop(self) -> None:
        """Drain and commit."""
        async with self._starting:
            self._address = ""
            await self._serving.aclose()


async def until_failed(controller: Running) -> None:
    """End the process when the controller cannot continue. Ray then starts another."""
    await give_up(controller, await asyncio.shield(controller.supervisor.failure))
