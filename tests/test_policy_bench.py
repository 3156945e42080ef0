"""The simulator scores choices by true means, and the adaptive policy comes close to the oracle."""

import json
from dataclasses import replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from speclen.bench.simulation.players import EstimatorPlayer
from speclen.bench.simulation.policy import Job, play, policy, summarise
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import Engine, World
from speclen.console.errors import UserError
from speclen.records import Arm, StepFlag, StepRecord

APP = typer.Typer()
APP.command()(policy)


class Oracle:
    """Plays the true table; learns nothing."""

    def __init__(self, world: World) -> None:
        course = world.courses[0]
        self.table = dict(zip(course.batch.tolist(), course.best().tolist(), strict=True))

    def pull(self, batch_size, with_prefill=False, worker=0):
        return self.table[batch_size], 0

    def report(self, worker, steps) -> None:
        pass


def test_an_oracle_scores_a_hundred():
    world = World(SCENARIOS["stationary"], 1, 800)
    assert world.play(Oracle(world)).score == pytest.approx(100.0)


def test_a_seed_is_a_world():
    first, again, other = (World(SCENARIOS["tails"], seed, 300) for seed in (1, 1, 2))
    assert (first.courses[0].seconds == again.courses[0].seconds).all()
    assert (first.courses[0].runs == again.courses[0].runs).all()
    assert not (first.courses[0].batch == other.courses[0].batch).all()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_reports_agree_with_the_true_means(scenario):
    """Over a run, reported times and runs have the means by which policies are scored (3% is 4 standard errors)."""
    course = World(replace(SCENARIOS[scenario], run_share=1.0), 3, 4000).courses[0]
    length = 3
    reported = course.seconds[:, length] * course.factor
    assert reported.mean() == pytest.approx(course.seconds[:, length].mean(), rel=0.12)
    tokens = 1.0 + (course.runs @ np.minimum(np.arange(9), length)) / course.batch
    assert tokens.mean() == pytest.approx(course.tokens_now[:, length].mean(), rel=0.03)


@pytest.mark.parametrize(
    ("scenario", "least"), [("stationary", 97.5), ("acceptance", 96.5), ("never", 75.0), ("cold", 95.0)]
)
def test_the_adaptive_policy_is_close_to_the_oracle(scenario, least):
    """A quarter of the full length, where the start weighs more; a profile against drafting costs most."""
    scores = {outcome.policy: outcome.score for outcome in play(Job(scenario, 910, ("adaptive", "none"), 3000))}
    assert scores["adaptive"] >= least
    assert scores["adaptive"] > scores["none"]


def test_a_probe_is_used_for_consecutive_steps_in_its_range():
    world = World(SCENARIOS["cold"], 4, 1200)
    player, probes = EstimatorPlayer(world), {}

    class Watching:
        report = player.report

        @staticmethod
        def pull(batch_size, with_prefill=False, worker=0):
            length, probe_id = player.pull(batch_size, with_prefill, worker)
            probes.setdefault(probe_id, []).append(length)
            return length, probe_id

    world.play(Watching())
    probes.pop(0)
    assert len(probes) > 0
    assert all(len(set(lengths)) == 1 and len(lengths) <= 3 for lengths in probes.values())


def test_the_verb_prints_json():
    arguments = [
        "--scenario",
        "never",
        "--policies",
        "adaptive,none",
        "--seeds",
        "2",
        "--steps",
        "300",
        "--processes",
        "1",
    ]
    result = CliRunner().invoke(APP, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout[result.stdout.index('{"steps"') :])
    assert [each["policy"] for each in document["summary"]] == ["adaptive", "none"]
    assert [each["seed"] for each in document["runs"]] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--scenario", "quiet"], "scenario 'quiet' is unknown"), (["--policies", "best"], "policy 'best' is unknown")],
)
def test_unknown_names_are_refused(arguments, sentence):
    result = CliRunner().invoke(APP, arguments)
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)


def test_summaries_take_the_worst_seed():
    outcomes = [*play(Job("never", 913, ("none",), 300)), *play(Job("never", 914, ("none",), 300))]
    (summary,) = summarise(outcomes)
    assert summary.worst == min(outcome.score for outcome in outcomes)
    assert summary.num_seeds == 2


def test_slower_steps_are_flagged_and_counted():
    """The first step of a shape, the first one after length 0, and those with prefill."""
    world = World(SCENARIOS["first-minute"], 5)
    assert len(world.courses[0].batch) == 1000
    engine, report = Engine(world.machine), StepRecord(1, 2, Arm(0), 0.02, (2,))
    outcomes = [
        engine.flagged(report._replace(arm=Arm(length)), joined, mean_s=0.02)
        for length, joined in ((0, False), (0, False), (0, True), (3, False), (3, False))
    ]
    first_use, none = {StepFlag.FIRST_USE}, set()
    flags = [first_use, none, {StepFlag.PREFILL}, first_use | {StepFlag.CATCH_UP}, none]
    assert [record.flags for record, _ in outcomes] == flags
    first, usual, prefill, resumed, again = (extra for _, extra in outcomes)
    assert usual == prefill == again == 0.0 < first < resumed


def test_a_fixed_length_pays_for_the_first_use_of_a_shape():
    (outcome,) = play(Job("first-minute", 5, ("fixed:2",), 12_000))
    world = World(SCENARIOS["first-minute"], 5)
    free = world.play_table(np.full(world.limits.max_batch_size + 1, 2)).score
    assert free - 3.0 < outcome.score < free
