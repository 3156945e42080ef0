"""A worker whose policy is exchanged while it runs, so that policies are compared on one warm process.

    python -m speclen.bench.serving.switch '{"listen": "127.0.0.1:7090", "target": "bundled:target-60m"}'

It is an ordinary worker; what is special is a desk at which its parent, on stdin, says which policy the engine follows
from now on. `adaptive` has a control client, which hears of the steps that it chose and of no others. Between policies
nothing runs, and what was remembered of earlier prompts is forgotten, so that who comes second is not served faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speclen.records import StepRecord, parse_arm
from speclen.transport.supervision import PartFailedError
from speclen.worker.config import WorkerConfig
from speclen.worker.drafting.arm_chooser import ArmChoice, ArmChooser

if TYPE_CHECKING:  # they import torch, which must see its settings first
    from prometheus_client import CollectorRegistry

    from speclen.worker.reporting.control_client import ControlClient
    from speclen.worker.service.async_engine import AsyncEngine

JOIN_TIMEOUT_S = 20.0
IDLE_TIMEOUT_S = 120.0
POLL_S = 0.01
SETTLE_S = 0.05  # for the engine's thread to end the step that finished the last request


@dataclass(frozen=True, slots=True)
class FixedTable:
    """The same arms for ever, one per batch size, that of 1 first."""

    choices: tuple[ArmChoice, ...]
    wants_evaluations: bool = False

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        """As ArmChooser."""
        return self.choices[min(batch_size, len(self.choices)) - 1]

    def report(self, record: StepRecord) -> None:
        """Forget it."""


def table_of(ranges: list[tuple[int, int, str]]) -> FixedTable:
    """ranges: first and last batch size, and the arm in words."""
    return FixedTable(tuple(ArmChoice(parse_arm(words)) for low, high, words in ranges for _ in range(low, high + 1)))


@dataclass(slots=True)
class Desk:
    """Uses policies, one command a line. Every answer is one line, too.

    client: of `adaptive`, and its connection to the controller; None before it learns.
    """

    config: WorkerConfig
    front: AsyncEngine
    client: ControlClient | None = None
    connection: asyncio.Task[None] | None = None

    async def run(self, commands: asyncio.StreamReader) -> None:
        """Answer until the parent closes the pipe or ends; then the worker ends as by SIGTERM."""
        while line := await commands.readline():
            try:
                await self.obey(json.loads(line))
                answer: dict[str, Any] = {"ok": True}
            except (ValueError, KeyError, TypeError, TimeoutError, PartFailedError) as error:
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    async def obey(self, command: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or TypeError for what is no command, TimeoutError when it cannot be done."""
        verbs: dict[str, Callable[..., Any]] = {"learn": self.learn, "use": self.use}
        await verbs[command.pop("do")](**command)

    async def learn(self, controller: str) -> None:
        """Join the controller at that address with a control client."""
        from speclen.worker.service.assembly import card_of, make_control  # here: it imports torch

        config, engine = replace(self.config, controller=controller, worker_id="adaptive"), self.front.engine
        client = make_control(config, engine.pair, engine.backend)
        client.card = card_of(client.card, engine)
        self.client, self.connection = client, asyncio.create_task(client.run(controller))
        await until(lambda: client.connected, JOIN_TIMEOUT_S, f"the worker has not joined {controller}")

    async def use(self, ranges: list[tuple[int, int, str]] | None) -> None:
        """Let the engine follow a table, or `adaptive`, from now on, once nothing runs any more."""
        chooser: ArmChooser = self._learner() if ranges is None else table_of(ranges)
        engine = self.front.engine
        await until(self._is_idle, IDLE_TIMEOUT_S, "requests are still running")
        await asyncio.sleep(SETTLE_S)
        engine.use_chooser(chooser)
        for model in (engine.target, engine.draft):
            if model is not None:
                model.pool.forget()

    async def close(self) -> None:
        """End the control client; nothing is measured any more."""
        if self.connection is not None:
            self.connection.cancel()
            await asyncio.gather(self.connection, return_exceptions=True)

    def _learner(self) -> ControlClient:
        """Raises PartFailedError if the control client has ended: without it the policy does not learn."""
        if self.client is None or self.connection is None:
            raise ValueError("nothing learns yet")
        if self.connection.done():
            error = None if self.connection.cancelled() else self.connection.exception()
            raise PartFailedError(f"the control client has ended: {error or 'without a reason'}")
        return self.client

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
    """The desk, open for the length of the block."""
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
    """Serve until SIGTERM, or until the parent is gone."""
    from speclen.worker.backends.spinning import set_spins

    config = WorkerConfig(**json.loads(sys.argv[1]), controller="")
    set_spins()  # before torch is imported
    from speclen.transport.logs import set_up_logs
    from speclen.worker.service.server import serve

    set_up_logs("info")
    asyncio.run(serve(config, lambda message: print(message, file=sys.stderr, flush=True), desk_front))


if __name__ == "__main__":
    main()
