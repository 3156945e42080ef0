"""Callers take turns, and no place is lost by cancellation; outputs reach their stream in order, with few wake-ups."""

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from speclen.worker.frontend.admission import Admission
from speclen.worker.frontend.async_engine import MOST_AT_ONCE, OutputRelay, OutputStream, in_parts
from speclen.worker.frontend.fair_queue import FairQueue, ThreadQueue
from speclen.worker.requests.request import FinishReason, QueueFullError, SequenceOutput
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S


class Requests:
    """Requests in a fair queue, in the order in which they got in."""

    def __init__(self, fair_queue: FairQueue) -> None:
        self.fair_queue = fair_queue
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.doors: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Add requests one after the other; a request's caller is the first letter of its name."""
        for name in names:
            self.doors[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._request(name))
            await asyncio.sleep(0)

    async def go(self, name: str) -> None:
        self.doors[name].set()
        for _ in range(4):
            await asyncio.sleep(0)

    async def _request(self, name: str) -> None:
        async with self.fair_queue.turn(name[0]):
            self.entered.append(name)
            await self.doors[name].wait()


async def test_callers_take_turns():
    requests = Requests(FairQueue(1, 10))
    await requests.come("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    for at in range(6):
        await requests.go(requests.entered[at])
    assert requests.entered == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_full_queue_is_shared_with_a_caller_who_comes_late():
    requests = Requests(FairQueue(1, 4))
    await requests.come("a0", "a1", "a2", "a3", "a4", "b1", "b2", "b3")
    await asyncio.sleep(0)
    for pushed_out in ("a4", "a3"):
        with pytest.raises(QueueFullError, match=r"evicted .* after 0\.\d s in the queue"):
            await requests.tasks[pushed_out]
    with pytest.raises(QueueFullError, match="waiting already"):  # two each: nothing would be fairer
        await requests.tasks["b3"]
    assert requests.fair_queue.num_waiting == 4


async def test_a_full_queue_names_the_setting_and_its_value():
    """Story: requests that wait in the engine, a quarter of the number of slots, were not counted."""
    pair: Any = SimpleNamespace(tokenizer=tiny_models.tokenizer(), vocab_size=tiny_models.VOCAB_SIZE, eos_token_ids=[0])
    admission = Admission(pair, 256, 4, 8)
    requests = Requests(admission.fair_queue)
    await requests.come(*(f"a{number}" for number in range(13)))
    with pytest.raises(QueueFullError, match="8 requests are waiting already, which is --max-waiting: try again later"):
        await requests.tasks["a12"]
    queue = ThreadQueue("grammars", 0)
    await queue.enter("a")
    with pytest.raises(QueueFullError, match="0 requests are waiting for the grammars already: try again later"):
        await queue.enter("b")


async def test_a_cancelled_task_holds_its_place_until_the_thread_is_free():
    """Otherwise cancelled callers leave work behind: texts of 4 MiB each once accumulated without bound."""
    queue, blocked, done = ThreadQueue("texts", 100), threading.Event(), []

    def work(number: int) -> None:
        blocked.wait(PATIENCE_S)
        done.append(number)

    for number in range(20):
        task = asyncio.create_task(queue.do("a", work, number))
        await asyncio.sleep(0.001)
        task.cancel()
    await asyncio.sleep(0.001)
    assert queue.num_waiting == 0
    blocked.set()
    async with queue.turn("a"):
        assert done == [0], "the place was taken until the first had ended, and no other began"
    queue.close()


@pytest.mark.parametrize("seed", range(20))
async def test_no_place_is_lost_under_random_cancellation(seed):
    """Random arrivals, departures and cancellations, some at the very moment at which the turn comes."""
    generator = random.Random(seed)
    requests = Requests(FairQueue(2, 5))
    for number in range(200):
        await requests.come(generator.choice("abc") + str(number))
        name = generator.choice(list(requests.tasks))
        requests.doors[name].set()
        if generator.random() < 0.5:
            await asyncio.sleep(0)
        requests.tasks[generator.choice(list(requests.tasks))].cancel()
        assert requests.fair_queue.num_waiting <= 5
    for door in requests.doors.values():
        door.set()
    await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
    assert requests.fair_queue.num_waiting == 0
    for _ in range(2):
        await asyncio.wait_for(requests.fair_queue.enter("a"), PATIENCE_S)


async def after_a_stay(fair_queue: FairQueue, seconds: float) -> Requests:
    fair_queue.leave(await fair_queue.enter("a") - seconds + 0.01)  # which this takes itself
    return Requests(fair_queue)


async def test_a_request_that_would_wait_too_long_is_refused_with_an_estimate():
    requests = await after_a_stay(FairQueue(2, 100, max_wait_s=3.0), 2.0)  # a place becomes free every second
    await requests.come("a1", "a2", "a3", "a4", "a5")
    assert requests.fair_queue.num_waiting == 3
    with pytest.raises(QueueFullError, match=r"3 requests .* about 4\.0 s, and --max-queue-s is 3: try again later"):
        async with requests.fair_queue.turn("a"):
            pass
    await requests.come("b1")  # whose turn comes after one of a's
    assert requests.fair_queue.num_waiting == 4


async def test_a_request_with_too_short_a_deadline_is_refused_at_once():
    requests = await after_a_stay(FairQueue(1, 100), 2.0)
    await requests.come("a1")
    with pytest.raises(QueueFullError, match=r"about 2\.0 s, and the deadline leaves 1\.5 s"):
        await requests.fair_queue.enter("a", patience_s=1.5)
    await requests.come("a2")
    assert requests.fair_queue.num_waiting == 1


def output(number: int, last: bool = False) -> SequenceOutput:
    return SequenceOutput(
        "r", 0, (number,), "", finish_reason=FinishReason.STOP if last else None, num_steps=number + 1
    )


async def test_order_is_kept_and_wakes_are_few():
    relay, stream = OutputRelay(asyncio.get_running_loop(), interval_s=0.01), OutputStream()

    def engine() -> None:
        for number in range(1000):
            relay.put(stream, output(number, last=number == 999))

    thread = threading.Thread(target=engine)
    thread.start()
    told = [await stream.next()]
    while told[-1][-1].finish_reason is None:
        told.append(await stream.next())
    thread.join()
    assert [one.token_ids[0] for outputs in told for one in outputs] == list(range(1000))
    assert len(told) < 100


async def test_the_first_tokens_do_not_wait_for_the_interval():
    relay, stream = OutputRelay(asyncio.get_running_loop(), interval_s=60.0), OutputStream()
    relay.put(stream, output(0))
    assert [one.token_ids for one in await asyncio.wait_for(stream.next(), PATIENCE_S)] == [(0,)]


@pytest.mark.parametrize(
    "sizes", [[], [1], [5, 0, 7], [MOST_AT_ONCE] * 3, [MOST_AT_ONCE - 1, 1, 2, 3 * MOST_AT_ONCE, 1]]
)
def test_gathered_outputs_are_sent_in_parts(sizes):
    """Story: everything that had gathered for a slow but steady client was one message, too large to send in time."""
    outputs = [SequenceOutput("r", 0, tuple(range(size)), "") for size in sizes]
    parts = list(in_parts(outputs))
    assert [one for part in parts for one in part] == outputs
    assert all(parts)
    assert all(sum(len(one.token_ids) for one in part[:-1]) < MOST_AT_ONCE for part in parts)
    assert len(parts) <= 1 + sum(sizes) // MOST_AT_ONCE
