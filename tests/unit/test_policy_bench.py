"""Simulated workers: the same for every policy, fair to the oracle, with reports of faulty workers."""

import pytest

from speclen.bench.simulation.learner import Constant
from speclen.bench.simulation.own_h200 import OwnH200
from speclen.bench.simulation.play import best_arm, play
from speclen.bench.simulation.policy import Job, run
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.vllm_h200 import VllmH200
from speclen.records import Arm

WORLDS = [VllmH200, OwnH200]


class Watcher(Constant):
    """A constant arm. reports: of every worker."""

    def __init__(self, arm):
        super().__init__(arm)
        self.reports = {}

    def observe(self, records, worker):
        self.reports.setdefault(worker, []).extend(records)


class Oracle(Constant):
    def __init__(self, world):
        self.world = world

    def arm_for(self, batch_size, worker):
        return best_arm(self.world, batch_size)


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_seed_gives_the_same_steps(world):
    first, second = Watcher(Arm(2)), Watcher(Arm(2))
    play(first, world(3, 5.0))
    play(second, world(3, 5.0))
    assert first.reports == second.reports
    assert len(first.reports["worker-0"]) > 100


@pytest.mark.parametrize("world", WORLDS)
def test_the_oracle_has_all_and_a_wrong_constant_less(world):
    """Means over 20 s: what the oracle's requests happen to accept moves its score by less than 3 points."""
    mine = world(1, 20.0)
    assert play(Oracle(mine), mine).percent() == pytest.approx(100.0, abs=3.0)
    assert play(Constant(Arm(0)), world(1, 20.0)).percent() < 75.0


@pytest.mark.parametrize("name", ["acceptance", "slow-draft"])
def test_the_oracle_follows_a_change(name):
    (world,) = SCENARIOS[name].worlds(1, 60.0)
    before = best_arm(world, 8)
    assert play(Oracle(world), world).percent() == pytest.approx(100.0, abs=3.0)
    (world,) = SCENARIOS[name].worlds(1, 60.0)
    while world.now_s < 30.0:
        world.step(before)
    assert best_arm(world, 8) != before


def test_a_faulty_worker_reports_more_often_that_all_was_accepted():
    watcher = Watcher(Arm(3))
    play(watcher, *SCENARIOS["liar"].worlds(1, 3.0), last_is_faulty=True)
    honest, faulty = watcher.reports["worker-0"], watcher.reports["worker-3"]
    assert len(faulty) > 10 * len(honest)
    assert all(each.accepted_histogram[-1] == each.batch_size for each in faulty)
    assert not all(each.accepted_histogram[-1] == each.batch_size for each in honest)


def test_a_learner_beats_a_wrong_profile():
    adaptive, profile = (run(Job("never", policy, 3, 60.0)) for policy in ("adaptive", "profile"))
    assert adaptive.whole > profile.whole + 5.0
