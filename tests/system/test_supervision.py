"""Whatever should never end is noticed when it does: started again and counted, or the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import speclen.transport.supervision
from speclen.transport.supervision import PartFailedError, Supervisor, describe, until_one_fails


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speclen.transport.supervision, "FIRST_PAUSE_S", 0.01)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 10.0))


async def kept_through(*ends: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Keep a part that comes to these ends, one after another, and then runs on; the task that kept it, after `stop`."""
    supervisor, again, left = Supervisor(), asyncio.Event(), list(ends)

    async def part() -> None:
        if left:
            await left.pop(0)()
            return
        again.set()
        await asyncio.sleep(60)

    supervisor.keep("reporting", part)
    await again.wait()
    assert supervisor.num_failures == {"reporting": len(ends)}
    (task,) = supervisor._tasks
    await supervisor.stop()
    return task


def test_a_part_that_ends_is_started_again_and_counted() -> None:
    async def returns() -> None:
        pass

    async def test() -> None:
        await kept_through(failing, returns)

    run(test)


def test_a_part_that_waits_for_what_was_cancelled_is_started_again() -> None:
    """Story: gRPC cancels a call in which it met an error, and reporting had ended for good with it, without a word."""

    async def waits() -> None:
        call = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(call.cancel)
        await call

    async def test() -> None:
        assert (await kept_through(waits)).cancelled()

    run(test)


def test_a_part_that_loses_its_cancellation_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: where a part failed in the moment in which it was cancelled, it was started again, and `stop` waited on."""
    monkeypatch.setattr(speclen.transport.supervision, "CANCEL_AGAIN_S", 0.05)

    async def test() -> None:
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

    run(test)


async def cancelled_from_within() -> None:
    raise asyncio.CancelledError


async def failing() -> None:
    await asyncio.sleep(0)
    raise ValueError("broken")


@pytest.mark.parametrize(("work", "error"), [(failing, "broken"), (cancelled_from_within, "was cancelled from within")])
def test_of_works_that_run_together_one_failure_ends_all(work: Any, error: str) -> None:
    async def test() -> None:
        ended = []

        async def other() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("other")

        with pytest.raises((ValueError, PartFailedError), match=error):
            await until_one_fails(other(), asyncio.sleep(0), work())
        assert ended == ["other"]

    run(test)


def test_works_that_run_together_and_return_are_all_waited_for() -> None:
    async def test() -> None:
        returned = []

        async def work(seconds: float) -> None:
            await asyncio.sleep(seconds)
            returned.append(seconds)

        await until_one_fails(work(0.02), work(0.0))
        assert returned == [0.0, 0.02]

    run(test)


def test_a_failure_in_another_thread_ends_the_waiting_and_the_first_one_counts() -> None:
    async def test() -> None:
        supervisor = Supervisor()
        supervisor.check()

        def fail() -> None:
            supervisor.fail("the engine", ZeroDivisionError("by zero"))
            supervisor.fail("the engine", RuntimeError("its loop returned"))

        threading.Thread(target=fail).start()
        with pytest.raises(PartFailedError, match="the engine has failed: ZeroDivisionError: by zero"):
            await supervisor.wait(asyncio.Event())
        with pytest.raises(PartFailedError, match="ZeroDivisionError"):
            supervisor.check()

    run(test)


def test_being_asked_to_stop_is_no_failure() -> None:
    async def test() -> None:
        supervisor, stopping = Supervisor(), asyncio.Event()
        stopping.set()
        await supervisor.wait(stopping)

    run(test)


def test_a_callback_that_fails_is_counted() -> None:
    async def test() -> None:
        supervisor = Supervisor()
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.01)
        assert supervisor.num_failures["event loop"] == 1

    run(test)


def test_a_failure_after_the_loop_has_closed_is_no_error() -> None:
    async def test() -> Supervisor:
        return Supervisor()

    supervisor = asyncio.run(test())
    supervisor.fail("the engine", RuntimeError("late"))


def test_an_error_is_described_with_its_place() -> None:
    assert describe(ExceptionGroup("two", [ValueError("first"), KeyError("second")])) == "ValueError: first"
    with pytest.raises(ValueError, match="invalid literal") as raised:
        int("x")
    said = describe(raised.value)
    assert said.startswith("ValueError: invalid literal")
    assert "(test_supervision.py:" in said


def test_a_loop_that_hangs_is_noticed_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speclen.transport.supervision, "HANG_LOOK_S", 0.05)
    monkeypatch.setattr(speclen.transport.supervision, "HANG_LOOKS", 4)
    places: list[str] = []

    async def test() -> None:
        watch = Supervisor().watch_loop(places.append)
        await asyncio.sleep(0.5)
        assert watch.is_alive(), "a loop that answers does not hang"
        assert not places
        time.sleep(0.6)  # noqa: ASYNC251  (a loop that hangs is the point)
        watch.join(5.0)

    run(test)
    assert "test_supervision.py" in places[0]


HANGING = """
import asyncio, time
from speclen.transport import supervision
supervision.HANG_LOOK_S, supervision.HANG_LOOKS = 0.05, 4

async def main():
    supervision.Supervisor().watch_loop()
    await asyncio.sleep(0.1)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_process_whose_loop_hangs_ends_with_a_word_and_code_1() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "its event loop does not answer" in done.stdout + done.stderr
    assert "<string>:9 main" in done.stdout + done.stderr


def test_a_loop_that_has_closed_does_not_hang() -> None:
    async def test() -> Any:
        return Supervisor().watch_loop(lambda place: pytest.fail(place))

    asyncio.run(test()).join(5.0)
