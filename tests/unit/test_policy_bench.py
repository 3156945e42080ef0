"""Simulated scenarios: fair between policies, scored against the oracle, with probes and faulty workers."""

import pytest

from speclen.bench.simulation.drawing import World
from speclen.bench.simulation.policy import Job, play
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import play as play_world
from speclen.records import Arm


class Oracle:
    """Knows the true best length of every batch size; they do not change in this scenario."""

    def __init__(self, world):
        course = world.courses[0]
        best = (course.tokens / course.seconds).argmax(axis=1)
        self.best = dict(zip(course.batch.tolist(), best.tolist(), strict=True))

    def observe(self, records, worker):
        pass

    def arm_for(self, batch_size, worker):
        return Arm(self.best[batch_size])

    def probe_for(self, batch_size, worker):
        return None


def test_an_oracle_scores_a_hundred():
    world = World(SCENARIOS["stationary"], 1, 800)
    assert play_world(world, Oracle(world)).score == pytest.approx(100.0)


def test_a_learner_beats_a_wrong_profile():
    adaptive, profile = play(Job("never", 3, ("adaptive", "profile"), 1500))
    assert adaptive.score > profile.score + 5.0
    assert adaptive.num_probes
