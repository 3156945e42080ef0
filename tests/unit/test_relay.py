"""Outputs reach their stream in order, all of them, and the event loop is woken far less often than they are put."""

import asyncio
import threading

import pytest

from speclen.worker.requests.request import FinishReason, SequenceOutput
from speclen.worker.service.async_engine import MOST_AT_ONCE, in_parts
from speclen.worker.service.relay import OutputRelay, OutputStream


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
    assert [one.token_ids for one in await asyncio.wait_for(stream.next(), 5)] == [(0,)]


@pytest.mark.parametrize(
    "sizes", [[], [1], [5, 0, 7], [MOST_AT_ONCE] * 3, [MOST_AT_ONCE - 1, 1, 2, 3 * MOST_AT_ONCE, 1]]
)
def test_what_gathered_is_sent_in_parts(sizes):
    """A client that reads steadily took longer than one message may for all that had gathered meanwhile."""
    outputs = [SequenceOutput("r", 0, tuple(range(size)), "") for size in sizes]
    parts = list(in_parts(outputs))
    assert [one for part in parts for one in part] == outputs
    assert all(parts)
    assert all(sum(len(one.token_ids) for one in part[:-1]) < MOST_AT_ONCE for part in parts)
    assert len(parts) <= 1 + sum(sizes) // MOST_AT_ONCE
