"""The law: the simulator scores choices by true means, and the adaptive policy is ahead where its issue says so."""

import json
from dataclasses import replace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from speclen.bench.simulation.closed_loop import ClosedLoop
from speclen.bench.simulation.copying.machine import TWO_CORES
from speclen.bench.simulation.copying.plans import plans
from speclen.bench.simulation.copying.recorded import recorded_texts
from speclen.bench.simulation.copying.truth import worth_of
from speclen.bench.simulation.players import make_player
from speclen.bench.simulation.policy import Job, play, policy, summarise
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import Engine, World
from speclen.console.errors import UserError
from speclen.controller.estimator.core import StepObservation
from speclen.controller.estimator.plans.plan import Plan
from speclen.controller.estimator.plans.reviews import STEPS, Reviews


class Clairvoyant:
    """Plays the true table; learns nothing."""

    def __init__(self, world: World) -> None:
        course = world.courses[0]
        self.table = dict(zip(course.batch.tolist(), course.best().tolist(), strict=True))

    def pull(self, batch_size: int, with_prompts: bool = False, worker: int = 0, rows: tuple[int, ...] = ()) -> int:
        return self.table[batch_size]

    def report(self, worker, steps) -> None:
        pass


def test_a_clairvoyant_scores_a_hundred():
    world = World(SCENARIOS["stationary"], 1, 800)
    assert world.play(Clairvoyant(world)).score == pytest.approx(100.0)


def test_a_seed_is_a_world():
    first, again, other = (World(SCENARIOS["tails"], seed, 300) for seed in (1, 1, 2))
    assert (first.courses[0].seconds == again.courses[0].seconds).all()
    assert (first.courses[0].runs == again.courses[0].runs).all()
    assert not (first.courses[0].batch == other.courses[0].batch).all()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_reports_agree_with_the_true_means(scenario):
    """Over a run, reported times and runs have the means by which policies are scored (3% is 4 standard errors)."""
    if SCENARIOS[scenario].closed_loop:
        pytest.skip("its reports are drawn while it plays")
    course = World(replace(SCENARIOS[scenario], run_share=1.0), 3, 4000).courses[0]
    length = 3
    reported = course.seconds[:, length] * course.factor + course.pause
    assert reported.mean() == pytest.approx(course.seconds[:, length].mean(), rel=0.12)
    runs = np.minimum(np.arange(9), length)
    tokens = 1.0 + (course.runs @ runs) / course.batch
    assert tokens.mean() == pytest.approx(course.tokens_now[:, length].mean(), rel=0.03)


def test_batch_sizes_sweep_the_whole_range():
    batch = World(SCENARIOS["stationary"], 4, 6000).courses[0].batch
    assert batch.min() == 1
    assert batch.max() == 32
    assert len(set(batch.tolist())) > 24


@pytest.mark.parametrize(
    ("scenario", "least"),
    [("stationary", 98.5), ("acceptance", 98.5), ("never", 96.0), ("cold", 97.5), ("stale", 97.0), ("pauses-5", 98.0)],
)
def test_the_adaptive_policy_is_close_to_the_clairvoyant_and_ahead(scenario, least):
    """A third of the full length, where the start weighs more: see docs/policy.md for the figures of whole runs."""
    rivals = ("profile", "thompson", "ema") if scenario in ("acceptance", "never") else ("thompson",)
    job = Job(scenario, 910, ("adaptive", *rivals), 3000)
    scores = {outcome.policy: outcome.score for outcome in play(job)}
    assert scores["adaptive"] >= least
    assert scores["adaptive"] == max(scores.values())


def test_recovery_after_acceptance_has_halved():
    (outcome,) = play(Job("acceptance", 911, ("adaptive",), 3000))
    assert len(outcome.recovery_steps) == 2
    assert max(outcome.recovery_steps) <= 300


def test_a_slow_policy_makes_its_own_queue():
    """Closed loop: the clairvoyant is the yardstick, plain decoding has longer queues, the adaptive policy is close."""
    loop = ClosedLoop(SCENARIOS["closed"], 912, duration_s=40.0)
    best = loop.play(None).latency_per_token_s
    assert loop.play(None).latency_per_token_s == best
    adaptive, none = (loop.play(make_player(loop.world, name)).latency_per_token_s for name in ("adaptive", "none"))
    assert adaptive < 1.15 * best
    assert none > adaptive


def test_the_verb_prints_json():
    app = typer.Typer()
    app.command()(policy)
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
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout[result.stdout.index('{"seeds"') :])
    assert [each["policy"] for each in document["summary"]] == ["adaptive", "none"]
    assert len(document["runs"]) == 4
    assert document["seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scenario", "quiet"], "scenario 'quiet' is unknown"),
        (["--policies", "best"], "policy 'best' is unknown"),
        (["--plot", "x.doc"], "ends in .png or .svg"),
    ],
)
def test_what_is_not_there_is_named(arguments, sentence):
    app = typer.Typer()
    app.command()(policy)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert sentence in str(result.exception)


def test_summaries_take_the_worst_seed_in_the_right_direction():
    outcomes = [*play(Job("never", 913, ("none",), 300)), *play(Job("never", 914, ("none",), 300))]
    (summary,) = summarise(outcomes)
    assert summary.worst == min(outcome.score for outcome in outcomes)
    assert summary.num_seeds == 2


def test_steps_that_say_nothing_about_time_are_flagged_and_counted() -> None:
    """The first step of a shape, the first one after length 0, and those that feed a prompt."""
    world = World(SCENARIOS["first-minute"], 5)
    assert len(world.courses[0].batch) == 1000
    engine = Engine(world.machine)
    report = StepObservation(2, 0, 0.02, (2,))
    outcomes = [
        engine.flagged(report._replace(speculation_length=length), joined, mean_s=0.02)
        for length, joined in ((0, False), (0, False), (0, True), (3, False), (3, False))
    ]
    assert [report.teaches_latency for report, _ in outcomes] == [False, True, False, False, True]
    first, usual, prompt, resumed, again = (extra for _, extra in outcomes)
    assert usual == prompt == again == 0.0 < first < resumed


def test_a_table_pays_for_the_first_use_of_a_shape_like_everybody() -> None:
    (outcome,) = play(Job("first-minute", 5, ("fixed:2",), 12_000))
    world = World(SCENARIOS["first-minute"], 5)
    free = world.play_table(np.full(world.limits.max_batch_size + 1, 2)).score
    assert free - 3.0 < outcome.score < free


def test_what_a_plan_makes_of_recorded_texts_is_known_exactly():
    """Counted here by whole texts, side by side, and by reviews one after the other."""
    text, reviews = recorded_texts("mixed"), Reviews(8, 3)
    sums = sum(reviews.count(text.review(begin)).sums[:, STEPS] for begin in text.begins.tolist())
    tokens = sum(len(text.review(begin).matches) for begin in text.begins.tolist())
    some = [Plan(0), Plan(3), Plan(0, 3, 8), Plan(5, 2, 16)]
    worth = worth_of(text, TWO_CORES, [1, 4], some)
    for plan in some:
        assert worth.tokens[plan] == pytest.approx(tokens / sums[reviews.place[plan]])
    assert worth.seconds[Plan(0), 4] == pytest.approx(float(TWO_CORES.seconds(4, *np.array([0, 0, 4]))))
    assert worth.best(4) == min(worth.seconds[plan, 4] / worth.tokens[plan] for plan in some)


def test_plans_are_played_in_simulated_texts_from_the_command_line():
    app = typer.Typer()
    app.command()(plans)
    options = ["--scenario", "recorded: copying", "--seeds", "1", "--steps", "600", "--processes", "1"]
    done = CliRunner().invoke(app, [*options, "--json"])
    assert done.exit_code == 0, done.output
    [run] = json.loads(done.stdout)["runs"]
    assert run["adaptive"] > run["best_length"], "copies are found within 600 steps"
    assert 100.0 >= run["later_half"] > 90.0
    assert 100.0 >= run["best_plan"] >= max(run["best_length"], run["copy"])
    unknown = CliRunner().invoke(app, ["--scenario", "no such"])
    assert isinstance(unknown.exception, UserError)
