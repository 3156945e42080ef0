"""A worker whose policy can be changed while it runs, so that policies are compared on one warm process.

    python -m speclen.bench.serving.switch '{"listen": "127.0.0.1:7090", "target": "bundled:target", "profile": null}'

It is an ordinary worker that also reads commands from its parent on stdin, which select the engine's policy. Each learning
policy has a control client of its own, which receives only the steps that this policy chose. Between policies nothing runs,
and cached prompts are dropped, so that a later policy has no advantage.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speclen.process.embedded import at
from speclen.process.supervision import PartFailedError
from speclen.worker.config import WorkerConfig

if TYPE_CHECKING:  # they import torch, which must see its settings first
    from prometheus_client import CollectorRegistry

    from speclen.worker.frontend.async_engine import AsyncEngine
    from speclen.worker.reporting.control_client import ControlClient

JOIN_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 120.0
POLL_S = 0.01
SETTLE_S = 0.05  # for the engine's thread to end the step that finished the last request


@dataclass(slots=True)
class Desk:
    """Executes commands, one JSON line each, and answers each with one line.

    learners: by policy, its control client and that client's task.
    """

    config: WorkerConfig
    front: AsyncEngine
    learners: dict[str, tuple[ControlClient, asyncio.Task[None]]] = field(default_factory=dict)

    async def run(self, commands: asyncio.StreamReader) -> None:
        """Answer commands until the parent closes the pipe or ends; then end the worker as by SIGTERM."""
        while line := await commands.readline():
            try:
                await self.obey(json.loads(line))
                answer: dict[str, Any] = {"ok": True}
            except (ValueError, KeyError, TypeError, TimeoutError, PartFailedError) as error:
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    async def obey(self, command: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError for an invalid command, TimeoutError if it takes too long."""
        verbs: dict[str, Callable[..., Any]] = {"learn": self.learn, "use": self.use}
        await verbs[command.pop("do")](**command)

    async def learn(self, policy: str, controller: str, seeded: bool) -> None:
        """Connect a control client to the controller at that address. seeded: True to start from the profile's table."""
        profile = self.config.profile if seeded else None
        client = self._client(controller=controller, worker_id=policy, profile=profile)
        self.learners[policy] = client, asyncio.create_task(client.run(at(controller)))
        await until(lambda: client.connected, JOIN_TIMEOUT_S, f"the worker has not joined {controller}")

    async def use(self, policy: str) -> None:
        """Switch the engine to a policy once it is idle."""
        chooser = self._learner(policy) if policy in self.learners else self._client(policy=policy)
        engine = self.front.engine
        await until(self._is_idle, IDLE_TIMEOUT_S, "requests are still running")
        await asyncio.sleep(SETTLE_S)
        engine.use_chooser(chooser)
        for model in (engine.target, engine.draft):
            if model is not None:
                model.pool.forget()

    async def close(self) -> None:
        """End the control clients."""
        connections = [connection for _, connection in self.learners.values()]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _client(self, **changes: Any) -> ControlClient:
        """The control client of a worker with these settings."""
        from speclen.worker.frontend.worker_server import make_control  # here: it imports torch

        engine = self.front.engine
        return make_control(replace(self.config, **changes), engine.pair, engine)

    def _learner(self, policy: str) -> ControlClient:
        """Raises PartFailedError if the control client has ended: without it the policy does not learn."""
        client, connection = self.learners[policy]
        if connection.done():
            error = None if connection.cancelled() else connection.exception()
            raise PartFailedError(f"the control client has ended: {error or 'without a reason'}")
        return client

    def _is_idle(self) -> bool:
        load = self.front.engine.load()
        return not (self.front.num_open or load.num_running or load.num_waiting)


async def until(holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    """Raises TimeoutError with a sentence."""
    for _ in range(int(timeout_s / POLL_S)):
        if holds():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"{otherwise} after {timeout_s:g} s")


@contextlib.asynccontextmanager
async def desk_front(
    config: WorkerConfig, engine: AsyncEngine, page: CollectorRegistry, fail: Callable[[BaseException], None]
) -> AsyncIterator[str]:
    """Answer commands for the length of the block."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    desk = Desk(config, engine)
    running = asyncio.create_task(desk.run(reader))

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    running.add_done_callback(ended)
    try:
        yield ""
    finally:
        running.cancel()
        await desk.close()


def main() -> None:
    """Serve until SIGTERM, or until the parent ends."""
    from speclen.worker.backends import set_spins

    settings = json.loads(sys.argv[1])
    config = WorkerConfig(**settings | {"profile": settings["profile"] and Path(settings["profile"]), "controller": ""})
    set_spins()  # before torch is imported
    from speclen.process.logs import set_up_logs
    from speclen.worker.frontend.worker_server import serve

    set_up_logs("info")
    asyncio.run(serve(config, lambda message: print(message, file=sys.stderr, flush=True), desk_front))


if __name__ == "__main__":
    main()
