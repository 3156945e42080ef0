"""The engine uses as many CPU threads as there are idle cores."""

import asyncio

import pytest
import torch
from structlog.testing import capture_logs

from speclen.worker.backends import threads
from speclen.worker.backends.threads import ThreadChoice, read_usage, watch_cores
from speclen.worker.requests.request import FinishReason
from tests.support.engines import generate, make_engine, make_pair, request


def test_a_containers_quota_bounds_the_threads(monkeypatch):
    """Beyond the quota, all threads are suspended for most of every period."""
    pair, before = make_pair(), torch.get_num_threads()
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1)
    monkeypatch.setattr(threads, "usable_cores", lambda: set(range(64)))
    try:
        found = []
        for quota in (float("inf"), 3.5, 0.5):
            monkeypatch.setattr(threads.machine, "cores", lambda quota=quota: quota)
            threads.set_threads(0, pair)
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert found == [64, 3, 1]


def test_a_thread_comes_back_when_a_core_is_free():
    choice = ThreadChoice(2)
    assert choice.update(0.4, 0.0, 10.0) == 1
    assert choice.update(0.0, 0.95, 11.0) == 1  # too soon
    assert choice.update(0.0, 0.3, 13.0) == 1  # no core is free
    assert choice.update(0.0, 0.95, 13.5) == 2


async def test_without_load_figures_the_number_of_threads_stays(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_usage({0}, proc=tmp_path)
    monkeypatch.setattr(threads, "read_usage", lambda cores: read_usage(cores, proc=tmp_path))

    """It says so once, and does not end: that would be taken for a failure."""
    with capture_logs() as logs, pytest.raises(TimeoutError):
        await asyncio.wait_for(watch_cores(ThreadChoice(2), pytest.fail), 0.2)
    assert [entry["event"] for entry in logs] == [
        "the number of threads stays: the system has no counters of waiting times"
    ]


def test_threads_that_cannot_be_started_end_no_request():
    engine = make_engine(chooser=2)
    asked = []

    number = engine.num_threads

    def refuse(num_threads):
        asked.append(num_threads)
        if num_threads != number:
            raise MemoryError("no room for another copy")

    engine.target.use_threads = refuse
    engine.use_threads(engine.num_threads + 1)
    collected = generate(engine, request("a", [3, 4, 5], max_tokens=8, ignore_eos=True))
    assert collected.last("a").finish_reason is FinishReason.LENGTH
    assert asked == [number + 1, number]
    assert engine.num_threads == number
