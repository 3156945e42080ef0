"""A background task that ends is noticed: it is restarted and counted, or ends the process."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import speclen.process.supervision
from speclen.process.supervision import Supervisor
from tests.support.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(speclen.process.supervision, "FIRST_PAUSE_S", 0.01)


async def cancelled_from_within() -> None:
    raise asyncio.CancelledError


async def failing() -> None:
    await asyncio.sleep(0)
    raise ValueError("broken")


async def kept_through(*ends: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Keep a part that comes to these ends, one after another, and then runs on until `stop`."""
    supervisor, again, stopped, left = Supervisor(), asyncio.Event(), asyncio.Event(), list(ends)

    async def part() -> None:
        if left:
            await left.pop(0)()
            return
        again.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    supervisor.keep("reporting", part)
    await again.wait()
    assert supervisor.num_failures == {"reporting": len(ends)}
    await supervisor.stop()
    assert stopped.is_set()


async def returns() -> None:
    pass


async def waits_for_what_is_cancelled() -> None:
    """Story: gRPC cancels a call after an error, which ended reporting permanently and silently."""
    call = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(call.cancel)
    await call


async def test_a_task_that_ends_is_restarted_and_counted():
    await kept_through(failing, returns, waits_for_what_is_cancelled)


@pytest.mark.parametrize(
    ("work", "words"), [(failing, "broken"), (returns, "without a reason"), (cancelled_from_within, "without a reason")]
)
async def test_a_task_that_must_not_end_fails_however_it_ends(work, words):
    supervisor = Supervisor()
    supervisor.start("a task", work())
    assert str(await supervisor.failure) == f"a task has ended: {words}"


async def test_a_task_that_loses_its_cancellation_does_not_delay_stopping(monkeypatch):
    """Story: a task that failed while it was being cancelled was restarted, and `stop` did not return."""
    monkeypatch.setattr(speclen.process.supervision, "CANCEL_AGAIN_S", 0.05)

    supervisor, failing_now, num_lost = Supervisor(), asyncio.Event(), 0

    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(failing_now.wait())
            group.create_task(asyncio.sleep(60))
            await failing_now.wait()
            raise KeyError("of another kind")

    async def loses() -> None:
        nonlocal num_lost
        while num_lost < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                num_lost += 1
        await asyncio.sleep(60)

    supervisor.keep("fails", fails)
    supervisor.keep("loses", loses)
    await asyncio.sleep(0.02)
    failing_now.set()
    await supervisor.stop()
    assert num_lost == 2
    supervisor.fail("the engine", RuntimeError("its loop returned"))
    await asyncio.sleep(0.02)
    assert not supervisor.failure.done(), "what is stopped on purpose has not failed"


HANGING = """
import asyncio, time
from speclen.process import supervision
supervision.HANG_LOOK_S, supervision.HANG_LOOKS = 0.05, 4

async def main():
    supervision.Supervisor().watch_loop()
    await asyncio.sleep(0.1)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_process_whose_loop_hangs_ends_with_a_message_and_code_1():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "its event loop hangs" in done.stdout + done.stderr
    assert "<string>:9 main" in done.stdout + done.stderr
