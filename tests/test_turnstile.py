"""Callers take turns, nobody fills the queue for the others, and no place is lost whoever goes when."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from speclen.worker.requests.request import QueueFullError
from speclen.worker.service.turnstile import Turnstile, done_by


class Requests:
    """Requests at a turnstile, in the order in which they got in."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._doors: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Requests, one after the other, whose caller is the first letter of their name."""
        for name in names:
            self._doors[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._request(name))
            await asyncio.sleep(0)

    async def go(self, name: str) -> None:
        self._doors[name].set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def _request(self, name: str) -> None:
        async with self.turnstile.turn(name[0]):
            self.entered.append(name)
            await self._doors[name].wait()


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 10.0))


def test_callers_take_turns() -> None:
    async def test() -> None:
        requests = Requests(Turnstile(1, 10))
        await requests.come("a1", "a2", "a3", "a4", "b1", "c1", "b2")
        for at in range(6):
            await requests.go(requests.entered[at])
        assert requests.entered == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]

    run(test)


def test_one_caller_may_use_the_whole_queue_and_no_more() -> None:
    async def test() -> None:
        requests = Requests(Turnstile(1, 2))
        await requests.come("a1", "a2", "a3")
        assert requests.turnstile.num_waiting == 2
        await requests.come("a4")
        with pytest.raises(QueueFullError, match="2 requests are waiting already"):
            await requests.tasks["a4"]

    run(test)


def test_a_full_queue_is_shared_with_a_caller_who_comes_late() -> None:
    async def test() -> None:
        requests = Requests(Turnstile(1, 4))
        await requests.come("a0", "a1", "a2", "a3", "a4", "b1", "b2", "b3")
        await asyncio.sleep(0)
        for pushed_out in ("a4", "a3"):
            with pytest.raises(QueueFullError, match=r"pushed out .* after 0\.\d s in the queue"):
                await requests.tasks[pushed_out]
        with pytest.raises(QueueFullError, match="waiting already"):  # two each: nothing would be fairer
            await requests.tasks["b3"]
        assert requests.turnstile.num_waiting == 4

    run(test)


def test_without_a_queue_whoever_finds_no_place_is_refused() -> None:
    async def test() -> None:
        requests = Requests(Turnstile(1, 0))
        await requests.come("a1")
        await requests.come("b1")
        with pytest.raises(QueueFullError):
            await requests.tasks["b1"]

    run(test)


def test_a_place_passes_over_those_who_give_up_as_it_becomes_free() -> None:
    async def test() -> None:
        requests = Requests(Turnstile(1, 10))
        await requests.come("a1", "a2", "a3", "a4")
        gone = asyncio.create_task(requests.go("a1"))
        await asyncio.sleep(0)  # a1 leaves next
        requests.tasks["a2"].cancel()
        requests.tasks["a3"].cancel()
        await gone
        assert requests.entered == ["a1", "a4"], "nobody else leaves, so it would wait for ever"

    run(test)


def test_who_gives_up_while_being_pushed_out_makes_room_all_the_same() -> None:
    async def test() -> None:
        requests = Requests(Turnstile(1, 3))
        await requests.come("a1", "a2", "a3", "a4")
        coming = asyncio.create_task(requests.come("b1"))
        await asyncio.sleep(0)  # b1 begins next
        requests.tasks["a4"].cancel()
        await coming
        await asyncio.sleep(0)
        assert not requests.tasks["b1"].done(), "it is to wait"
        assert requests.turnstile.num_waiting == 3

    run(test)


def test_other_threads_may_ask_how_many_wait() -> None:
    """While a metrics page is made callers come and go."""
    turnstile = Turnstile(1, 10)

    class Busy(deque[Any]):
        def __len__(self) -> int:
            turnstile._waiting["b"] = deque()
            return 2

    turnstile._waiting["a"] = Busy()
    assert turnstile.num_waiting == 2


def test_the_place_of_who_gives_up_is_taken_until_the_thread_lets_go() -> None:
    """Else whoever comes and goes leaves work behind: once texts of 4 MiB each, without bound."""

    async def test() -> None:
        turnstile, blocked, done = Turnstile(1, 100), threading.Event(), []

        async def work(number: int) -> None:
            async with turnstile.turn("a"):
                await done_by(thread, lambda: (blocked.wait(10), done.append(number)))

        with ThreadPoolExecutor(1) as thread:
            for number in range(20):
                task = asyncio.create_task(work(number))
                await asyncio.sleep(0.001)
                task.cancel()
            await asyncio.sleep(0.001)
            assert thread._work_queue.qsize() == 0
            assert turnstile._num_free == 0
            blocked.set()
            async with turnstile.turn("a"):
                assert done == [0]

    run(test)


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_lost_whoever_goes_when(seed: int) -> None:
    """Random arrivals, departures and cancellations, some at the very moment at which the turn comes."""

    async def test() -> None:
        generator = random.Random(seed)
        requests = Requests(Turnstile(2, 5))
        for number in range(200):
            await requests.come(generator.choice("abc") + str(number))
            name = generator.choice(list(requests.tasks))
            requests._doors[name].set()
            if generator.random() < 0.5:
                await asyncio.sleep(0)
            requests.tasks[generator.choice(list(requests.tasks))].cancel()
            assert requests.turnstile.num_waiting <= 5
        for door in requests._doors.values():
            door.set()
        await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
        assert requests.turnstile.num_waiting == 0
        assert requests.turnstile._num_free == 2

    run(test)


def after_a_stay(turnstile: Turnstile, seconds: float) -> Requests:
    turnstile._mean_stay_s = seconds
    return Requests(turnstile)


def test_who_would_wait_too_long_is_refused_at_once_and_told_how_long() -> None:
    async def test() -> None:
        requests = after_a_stay(Turnstile(2, 100, max_wait_s=3.0), 2.0)  # a place becomes free every second
        await requests.come("a1", "a2", "a3", "a4", "a5")
        assert requests.turnstile.num_waiting == 3
        with pytest.raises(
            QueueFullError, match=r"3 requests .* about 4\.0 s, and --max-queue-s is 3: try again later"
        ):
            async with requests.turnstile.turn("a"):
                pass
        await requests.come("b1")  # whose turn comes after one of a's
        assert requests.turnstile.num_waiting == 4

    run(test)


def test_who_cannot_wait_so_long_is_refused_at_once() -> None:
    async def test() -> None:
        requests = after_a_stay(Turnstile(1, 100), 2.0)
        await requests.come("a1")
        with pytest.raises(QueueFullError, match=r"about 2\.0 s, and the deadline leaves 1\.5 s"):
            async with requests.turnstile.turn("a", patience_s=1.5):
                pass
        await requests.come("a2")
        assert requests.turnstile.num_waiting == 1

    run(test)


def test_how_long_requests_stay_is_learned() -> None:
    async def test() -> None:
        turnstile = Turnstile(1, 100)
        assert turnstile.expected_wait_s("a") == 0.0
        async with turnstile.turn("a"):
            assert turnstile.expected_wait_s("a") == 0.0, "nothing is known yet"
            await asyncio.sleep(0.02)
        async with turnstile.turn("a"):
            assert 0.02 <= turnstile.expected_wait_s("a") < 1.0
        assert turnstile.expected_wait_s("a") == 0.0, "a place is free"

    run(test)


def test_places_of_sequences_that_have_ended_are_for_the_next_ones() -> None:
    """Else rows would be idle until the last sequence of a request has ended."""

    async def test() -> None:
        turnstile = Turnstile(4, 100)
        async with turnstile.turn("a", num_places=6) as places:
            other = Requests(turnstile)
            await other.come("b1", "b2")
            places.give_back(2)
            await asyncio.sleep(0.001)
            assert other.entered == []
            places.give_back()
            await asyncio.sleep(0.001)
            assert other.entered == ["b1"]
        await asyncio.sleep(0.001)
        assert other.entered == ["b1", "b2"]
        for name in other.entered:
            await other.go(name)
        assert turnstile._num_free == 4

    run(test)


def test_a_request_takes_as_many_places_as_it_has_sequences() -> None:
    """Story: forty requests of 64 sequences were all inside, and another caller's waited until nearly all had ended."""

    async def test() -> None:
        turnstile, entered = Turnstile(4, 100), []

        async def request(name: str, num_places: int, done: asyncio.Event) -> None:
            async with turnstile.turn(name[0], num_places=num_places):
                entered.append(name)
                await done.wait()

        doors = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1", "c1")}
        tasks = []
        for name, places in (("a1", 3), ("a2", 64), ("a3", 64), ("b1", 1), ("c1", 2)):
            tasks.append(asyncio.create_task(request(name, places, doors[name])))
            await asyncio.sleep(0)
        assert entered == ["a1", "a2"], "one place was free, which is enough for any"
        assert turnstile.num_waiting == 3
        turnstile._mean_stay_s = 4.0
        assert turnstile.expected_wait_s("d") == 4.0 * (64 + 1 + 2 + 1 + 63) / 4
        doors["a1"].set()
        await asyncio.sleep(0.001)
        assert entered == ["a1", "a2"]
        for name, now_inside in (("a2", ["a3"]), ("a3", ["b1", "c1"])):
            doors[name].set()
            await asyncio.sleep(0.001)
            assert entered[-len(now_inside) :] == now_inside
        for door in doors.values():
            door.set()
        await asyncio.gather(*tasks)
        assert turnstile._num_free == 4

    run(test)
