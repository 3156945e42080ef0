"""One thread computes, and it uses as many CPU threads as there are cores that nobody else wants."""

import asyncio
import itertools
import os

import pytest
import torch
from structlog.testing import capture_logs

from speclen.records import PLAIN
from speclen.worker.backends import threads
from speclen.worker.backends.spinning import SPINS, set_spins
from speclen.worker.backends.threads import ThreadChoice, Usage, free_cores, read_usage, waited_share, watch_cores
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.requests.request import FinishReason
from tests.support.engines import generate, make_engine, make_pair, request


def test_a_containers_quota_bounds_the_threads(monkeypatch):
    """Beyond it all of them are stopped for most of every period."""
    pair, before = make_pair(), torch.get_num_threads()
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1)
    monkeypatch.setattr(threads, "usable_cores", lambda: set(range(64)))
    try:
        found = []
        for quota in (float("inf"), 3.5, 0.5):
            monkeypatch.setattr(threads.control_groups, "cores", lambda quota=quota: quota)
            threads.set_threads(0, pair)
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert found == [64, 3, 1]


def test_a_crowded_machine_takes_a_thread_at_a_time():
    choice = ThreadChoice(3)
    assert [choice.update(0.4, 0.0, now) for now in (1.0, 1.5, 2.0, 2.5)] == [2, 1, 1, 1]


def test_a_thread_comes_back_when_a_core_is_free():
    choice = ThreadChoice(2)
    assert choice.update(0.4, 0.0, 10.0) == 1
    assert choice.update(0.0, 0.95, 11.0) == 1  # too soon
    assert choice.update(0.0, 0.3, 13.0) == 1  # no core is free
    assert choice.update(0.0, 0.95, 13.5) == 2


def test_trials_that_fail_become_rarer_and_a_success_forgets_them():
    choice, now, trials = ThreadChoice(2), 0.0, []
    while now < 200.0:  # a neighbour that only shows when its core is taken
        before = choice.threads
        crowded = before == 2
        if choice.update(0.4 if crowded else 0.0, 0.0 if crowded else 1.0, now) > before:
            trials.append(now)
        now += 0.5
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 6.0
    assert gaps[-1] >= 60.0
    assert choice.update(0.0, 1.0, now + 60.0) == 2
    assert choice.update(0.4, 0.0, now + 90.0) == 1
    assert choice.update(0.0, 1.0, now + 92.5) == 2


def test_only_busy_threads_say_how_long_threads_wait():
    before = Usage(10.0, {"1": 5.0, "2": 1.0}, {"1": 0.0, "2": 0.0}, 3.0)
    after = Usage(12.0, {"1": 6.0, "2": 1.01, "3": 0.5}, {"1": 0.6, "2": 0.3, "3": 0.1}, 4.0)
    assert waited_share(before, after) == pytest.approx(0.3)
    assert free_cores(before, after) == pytest.approx(0.5)
    assert waited_share(after, Usage(13.0, after.ran, after.waited, 5.0)) == 0.0


async def test_where_nothing_is_counted_the_number_stays(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_usage({0}, proc=tmp_path)
    monkeypatch.setattr(threads, "read_usage", lambda cores: read_usage(cores, proc=tmp_path))

    """It says so once, and does not end: that would be taken for a failure."""
    with capture_logs() as logs, pytest.raises(TimeoutError):
        await asyncio.wait_for(watch_cores(ThreadChoice(2), pytest.fail), 0.2)
    assert [entry["event"] for entry in logs] == ["the system does not tell how long threads wait: their number stays"]


def test_watching_tells_the_engine(monkeypatch):
    moments = iter(range(1000))

    def crowded(cores):
        at = next(moments)
        return Usage(float(at), {"1": at * 0.5}, {"1": at * 0.5}, 0.0)

    monkeypatch.setattr(threads, "read_usage", crowded)
    monkeypatch.setattr(threads, "INTERVAL_S", 0.001)
    used = []

    async def watch():
        task = asyncio.create_task(watch_cores(ThreadChoice(3), used.append))
        while len(used) < 2:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(watch(), 5.0))
    assert used == [2, 1]


def test_the_engine_changes_its_threads_between_steps():
    before = torch.get_num_threads()
    try:
        engine = Engine(make_pair(), EngineConfig(backend="torch"), FixedArm(PLAIN))
        assert engine.num_threads == before
        engine.use_threads(before + 1)
        assert torch.get_num_threads() == before
        engine.step()
        assert engine.num_threads == torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_threads_that_cannot_be_had_end_no_request_and_are_not_asked_for_again():
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


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_the_environment_goes_before_our_spins(monkeypatch, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_spins()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
