"""One run of a track: what the worker did is watched, and cores are taken and given back when the track says so."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass

import pytest
from fake_generation import FakeService, serving

from speclen.bench.serving import run_track as module
from speclen.bench.serving.deployment import Contender
from speclen.bench.serving.run_track import run_track
from speclen.bench.serving.tracks import Arrival, Track


@dataclass
class FakeWorker:
    address: str
    exit_code: int | None = None

    def last_line(self) -> str:
        return "out of memory"


@dataclass
class FakeFleet:
    """A worker that is there already; its process used 10 ms between any two looks."""

    worker: FakeWorker
    contender: Contender
    used_s: float = 0.0

    def cpu_seconds(self) -> dict[str, float]:
        self.used_s += 0.01
        return {"worker": self.used_s}


def serve(track, service, exit_code=None):
    async def run():
        async with serving(service) as address:
            deployment = FakeFleet(FakeWorker(address, exit_code), Contender("none", "none"))
            return await run_track(deployment, track, [(1, 2)] * len(track.arrivals), repeat=1, num_burners=2)

    return asyncio.run(run())


def make_track(**changes):
    arrivals = tuple(Arrival(0.1 * index, "code", 0, 2, 20) for index in range(5))
    return Track("x", 0, duration_s=0.5, warm_up_s=0.0, capacity_tokens_per_s=1.0, arrivals=arrivals, **changes)


def test_a_run_keeps_every_outcome_and_what_the_worker_published():
    run = serve(make_track(), FakeService(step_s=0.02))
    assert (run.contender, run.repeat, run.worker_exit) == ("none", 1, "")
    assert [outcome.num_tokens for outcome in run.outcomes] == [20] * 5
    assert run.cpu_s == {"worker": pytest.approx(0.01)}
    assert run.samples[-1].num_generated_tokens > 0
    assert run.seconds >= 0.8


def test_a_worker_that_died_is_named_with_its_last_words():
    run = serve(make_track(), FakeService(step_s=0.001, fail_after=2), exit_code=-9)
    assert sum(bool(outcome.error) for outcome in run.outcomes) == 3
    assert run.worker_exit == "the worker ended with code -9: out of memory"


def test_cores_are_taken_half_way_and_given_back(monkeypatch):
    burners = []

    def start() -> subprocess.Popen:
        burners.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return burners[-1]

    monkeypatch.setattr(module, "start_burner", start)
    serve(make_track(), FakeService(step_s=0.001))
    assert not burners
    serve(make_track(throttle_at_s=0.2), FakeService(step_s=0.02))
    assert len(burners) == 2
    assert all(burner.poll() is not None for burner in burners)


def test_a_track_that_ends_before_its_throttling_starts_nothing(monkeypatch):
    monkeypatch.setattr(module, "start_burner", lambda: 1 / 0)
    serve(make_track(throttle_at_s=60.0), FakeService(step_s=0.001))
