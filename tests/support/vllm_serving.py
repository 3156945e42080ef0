"""Serve through the plugin's scheduler as vLLM's engine does, next to a real controller."""

import asyncio
import contextlib
import threading
import time

from speclen.controller.estimator import EstimatorSettings
from tests.support import fake_vllm
from tests.support.control_fakes import served
from tests.support.waiting import PATIENCE_S, until

UNREACHABLE = "127.0.0.1:9"  # the discard port: nothing listens there


def serve(scheduler, num_steps=20, num_requests=2):
    """Steps as vLLM's engine takes them, one ahead where they overlap; the lengths that were drafted."""
    for number in range(num_requests):
        scheduler.add(f"r{number}", 10)
    lengths, in_flight, is_overlapped = [], [], isinstance(scheduler, fake_vllm.AsyncScheduler)
    for _ in range(num_steps):
        in_flight.append(scheduler.schedule())
        lengths.append(in_flight[-1].num_spec_tokens_to_schedule)
        if len(in_flight) > is_overlapped:
            end(scheduler, in_flight.pop(0))
        time.sleep(0.001)
    for output in in_flight:
        end(scheduler, output)
    return lengths


def end(scheduler, output):
    """The result of a step: every sequence accepts one token."""
    drafts = output.scheduled_spec_decode_tokens
    rows = {name: min(1, len(drafts.get(name, ()))) for name in output.num_scheduled_tokens}
    scheduler.update_from_output(output, fake_vllm.sampled(rows))
    if not isinstance(scheduler, fake_vllm.AsyncScheduler):
        scheduler.update_draft_token_ids(output)


def joined(scheduler):
    """The scheduler, known to its controller."""
    until(lambda: scheduler.steering.control.connected, what="joined")
    return scheduler


def check_reported(scheduler):
    """All of its reports are on the controller's disk, and none was refused."""
    control = scheduler.steering.control
    until(lambda: not control.buffer, what="reports on disk")
    assert control.num_refused == 0


@contextlib.contextmanager
def controller(tmp_path, length=2, **options):
    """A controller in its own thread, since the test's thread is the engine. length: the one that it always selects."""
    settings = EstimatorSettings(cold_length=length, hysteresis=1e3, explored=1e-9)
    ready, ended, found = threading.Event(), threading.Event(), []

    async def hold():
        async with served(tmp_path, **options) as each:
            each.service.estimators.settings = settings
            found.append(each)
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield found[0]
    finally:
        ended.set()
        thread.join()
