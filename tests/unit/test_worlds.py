"""Simulated workers from recordings: the same for every policy, fair to the oracle, with the flags of real ones."""

import pytest

from speclen.bench.simulation.worlds.learners import Adaptive, Constant
from speclen.bench.simulation.worlds.own_h200 import OwnH200
from speclen.bench.simulation.worlds.play import best_arm, play
from speclen.bench.simulation.worlds.vllm_h200 import VllmH200
from speclen.records import Arm, Limits, Probe, StepFlag

WORLDS = [VllmH200, OwnH200]


class Watcher(Constant):
    """A constant arm with a probe of three steps whenever one may begin."""

    def __init__(self, arm, probed=None):
        super().__init__(arm)
        self.probed, self.records = probed, []

    def observe(self, records):
        self.records += records

    def probe_for(self, batch_size):
        return None if self.probed is None else Probe(1, batch_size, batch_size, self.probed, 3)


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


@pytest.mark.parametrize("world", WORLDS)
def test_records_add_up(world):
    watcher = Watcher(Arm(3))
    play(world(2, 5.0), watcher)
    for record in watcher.records:
        assert sum(record.accepted_histogram) == record.batch_size
        assert record.num_verified_tokens >= record.batch_size
        assert record.latency_s > 0.0


def test_the_first_step_of_a_probe_is_flagged():
    watcher = Watcher(Arm(3), Arm(5))
    play(VllmH200(0, 5.0), watcher)
    probes = [record for record in watcher.records if record.probe_id == 1]
    assert [record.arm for record in probes] == [Arm(5)] * 3
    assert [StepFlag.CHANGED_ARM in record.flags for record in probes] == [True, False, False]


def test_outputs_are_evaluated_for_every_arm():
    watcher, world = Watcher(Arm(2, ngram=True)), OwnH200(0, 10.0)
    play(world, watcher)
    evaluations = [evaluation for record in watcher.records for evaluation in record.evaluations]
    assert evaluations
    for each in evaluations:
        assert len(each.num_steps) == len(world.arms)
        assert max(each.num_steps) == each.num_steps[0] == each.num_tokens, "plain decoding takes a step a token"
    assert max(len(record.accepted_histogram) for record in watcher.records) == 9


@pytest.mark.parametrize(("world", "limits"), [(VllmH200, Limits(32, 8)), (OwnH200, Limits(16, 8, True))])
def test_the_estimator_is_far_ahead_of_plain_decoding(world, limits):
    assert play(world(1, 20.0), Adaptive(limits, 4)).percent() > 85.0
