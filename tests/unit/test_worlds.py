"""Simulated workers from recordings: the same for every policy, fair to the oracle, with the flags of real ones."""

import pytest

from speclen.bench.simulation.worlds.learners import Constant
from speclen.bench.simulation.worlds.own_h200 import OwnH200
from speclen.bench.simulation.worlds.play import best_arm, play
from speclen.bench.simulation.worlds.vllm_h200 import PROBE_STEPS, VllmH200
from speclen.records import Arm, Probe

WORLDS = [VllmH200, OwnH200]


class Watcher(Constant):
    """A constant arm with a probe of PROBE_STEPS whenever one may begin."""

    def __init__(self, arm, probed=None):
        super().__init__(arm)
        self.probed, self.records = probed, []

    def observe(self, records):
        self.records += records

    def probe_for(self, batch_size):
        return None if self.probed is None else Probe(1, batch_size, batch_size + 1, self.probed, PROBE_STEPS)


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


def test_a_probe_of_vllm_has_one_usable_time():
    watcher = Watcher(Arm(3), Arm(5))
    play(VllmH200(0, 20.0), watcher)
    probed = [record for record in watcher.records if record.probe_id]
    assert {record.arm for record in probed} == {Arm(5)}
    usable = [record for record in probed if not record.flags]
    assert 0 < len(usable) <= len(probed) / PROBE_STEPS
    plain = [record for record in watcher.records if not record.probe_id and not record.flags]
    assert len(plain) > 0.3 * len(watcher.records)
    assert min(record.latency_s for record in [*plain, *usable]) > 0.005, "steps after an empty queue are flagged"


def test_outputs_are_evaluated_and_ngram_tokens_counted():
    arm = Arm(2, ngram=True)
    watcher = Watcher(arm)
    play(OwnH200(0, 10.0), watcher)
    outputs = [output for record in watcher.records for output in record.evaluations]
    assert outputs
    assert all(len(output.num_steps) == len(OwnH200.arms) for output in outputs)
    assert all(output.num_steps[0] == output.num_tokens for output in outputs)
    assert {len(record.accepted_histogram) for record in watcher.records} == {arm.max_tokens + 1}
    assert any(sum(record.accepted_histogram[3:]) for record in watcher.records)
