"""Simulated workers from recordings: the same for every policy, fair to the oracle, with the flags of real ones."""

import pytest

from speclen.bench.simulation.learner import Constant
from speclen.bench.simulation.worlds.own_h200 import OwnH200
from speclen.bench.simulation.worlds.play import best_arm, play
from speclen.bench.simulation.worlds.vllm_h200 import VllmH200
from speclen.records import Arm

WORLDS = [VllmH200, OwnH200]


class Watcher(Constant):
    """A constant arm."""

    def __init__(self, arm):
        super().__init__(arm)
        self.records = []

    def observe(self, records):
        self.records += records


class Oracle(Constant):
    def __init__(self, world):
        self.world = world

    def arm_for(self, batch_size):
        return best_arm(self.world, batch_size)


@pytest.mark.parametrize("world", WORLDS)
def test_the_same_seed_gives_the_same_steps(world):
    first, second = Watcher(Arm(2)), Watcher(Arm(2))
    play(world(3, 5.0), first)
    play(world(3, 5.0), second)
    assert first.records == second.records
    assert len(first.records) > 100


@pytest.mark.parametrize("world", WORLDS)
def test_the_oracle_has_all_and_a_wrong_constant_less(world):
    """Means over 20 s: what the oracle's requests happen to accept moves its score by less than 3 points."""
    assert play(world(1, 20.0), Oracle(world(1, 20.0))).percent() == pytest.approx(100.0, abs=3.0)
    assert play(world(1, 20.0), Constant(Arm(0))).percent() < 75.0
