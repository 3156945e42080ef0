"""Simulated scenarios: fair between policies, scored against the oracle, with probes and faulty workers."""

import pytest

from speclen.bench.simulation.courses import Engine
from speclen.bench.simulation.drawing import World
from speclen.bench.simulation.learner import EstimatorLearner, ProbeRun
from speclen.bench.simulation.policy import Job, play
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import play as play_world
from speclen.records import Arm, Probe, StepFlag, StepRecord


class Watcher(EstimatorLearner):
    def __init__(self, world, policy):
        super().__init__(world.limits, policy, world.profile)
        self.records = []

    def observe(self, records, worker="worker-0"):
        self.records += records
        super().observe(records, worker)


@pytest.mark.parametrize("name", ["stationary", "first-minute-cold", "classes", "unlike-2"])
def test_records_add_up(name):
    world = World(SCENARIOS[name], 1, 1200)
    watcher = Watcher(world, "fixed:3")
    play_world(world, watcher)
    for record in watcher.records:
        assert record.arm == Arm(3)
        assert sum(record.accepted_histogram) == record.batch_size
        if record.class_histograms:
            assert sum(sum(histogram) for _, histogram in record.class_histograms) == record.batch_size
    assert (StepFlag.FIRST_USE in watcher.records[0].flags) == SCENARIOS[name].engine_flags


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


def test_a_seed_is_a_world():
    first, again, other = (World(SCENARIOS["tails"], seed, 300) for seed in (1, 1, 2))
    assert (first.courses[0].seconds == again.courses[0].seconds).all()
    assert not (first.courses[0].batch == other.courses[0].batch).all()


def test_slower_steps_are_flagged_and_counted():
    """The first step of a shape, the first one after length 0, and those with prefill."""
    engine, record = Engine(World(SCENARIOS["first-minute-cold"], 5).machine), StepRecord(1, 2, Arm(0), 0.02, (2,))
    steps = ((0, False), (0, False), (0, True), (3, False), (3, False))
    found = [engine.flagged(record._replace(arm=Arm(length)), joined, mean_s=0.02) for length, joined in steps]
    first_use = {StepFlag.FIRST_USE}
    flags = [first_use, set(), {StepFlag.PREFILL}, first_use | {StepFlag.CATCH_UP}, set()]
    assert [flagged.flags for flagged, _ in found] == flags
    first, usual, prefill, resumed, again = (extra for _, extra in found)
    assert usual == prefill == again == 0.0 < first < resumed


def test_the_profile_of_the_own_machine_is_near_the_oracle_and_plain_decoding_is_not():
    profile, plain = play(Job("stationary", 2, ("profile", "none"), 1500))
    assert profile.score > 97.0
    assert plain.score < 90.0


def test_a_learner_beats_a_wrong_profile():
    adaptive, profile = play(Job("never", 3, ("adaptive", "profile"), 1500))
    assert adaptive.score > profile.score + 5.0
    assert adaptive.num_probes


def test_a_probe_is_a_run_at_its_batch_sizes():
    run = ProbeRun(Probe(1, 3, 4, Arm(5), num_steps=3))
    assert not run.fits(5)
    assert not run.is_over(5)
    run.steps_left -= 1
    assert run.fits(4)
    assert run.is_over(5)
