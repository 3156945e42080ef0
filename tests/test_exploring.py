"""The law: exploring never costs more than what was set aside for it, and there is a way back from not drafting."""

import numpy as np
import pytest

from speclen.bench.simulation.players import make_player
from speclen.bench.simulation.scenarios import SCENARIOS
from speclen.bench.simulation.simulator import World
from speclen.controller.estimator.choice import CAP_STEPS_AT_ZERO, CHANGE, MARGIN, RESUME_HORIZON, SHARE_AT_ZERO
from speclen.controller.estimator.core import StepObservation
from tests.steps_of import KEY, Steps, controller_for, serve


@pytest.mark.parametrize("scenario", ["stationary", "other-hardware", "cliffs"])
def test_probes_cost_at_most_their_share_of_the_time(scenario):
    """By the ledger: expected losses of all probes stay within share * time plus what visited buckets may overdraw."""
    world = World(SCENARIOS[scenario], 900, 1500)
    player = make_player(world, "adaptive")
    run = world.play(player)
    choice = player.estimator.context(player.estimator.contexts[0]).main.choice
    visited, longest = len(set(world.courses[0].batch.tolist())), float(run.seconds.max())
    start = visited * CAP_STEPS_AT_ZERO * longest
    assert choice.probe_s <= SHARE_AT_ZERO * run.seconds.sum() * 1.05 + start
    assert player.num_probes > 0


def profile_cost(world: World) -> tuple[np.ndarray, np.ndarray]:
    """Cumulative time of the adaptive policy, and of the profile's table for the same work, by true means."""
    run, table = (world.play(make_player(world, name)) for name in ("adaptive", "profile"))
    return run.seconds.cumsum(), (run.work * table.seconds / table.work).cumsum()


@pytest.mark.parametrize("scenario", ["stationary", "doubling", "tails", "pauses-5"])
@pytest.mark.parametrize("seed", [901, 902])
def test_at_no_time_is_it_much_behind_the_profiles_table(scenario, seed):
    """Where the profile is right there is little to gain: time <= 1.003 times that of its table, plus 40 steps, always.

    The steps on top are what the start may cost: probes, and the time until choices and bumps are known.
    """
    spent, table = profile_cost(World(SCENARIOS[scenario], seed, 3000))
    step = table[-1] / len(table)
    assert (spent - 1.003 * table).max() <= 40 * step


def test_probes_keep_to_the_limit_of_the_worker_that_does_them():
    """What is handed out is paid for, so a length that the worker cannot do would be lost."""
    controller, steps = controller_for(Steps(11), factor=4.0), Steps(11)
    for at in range(400):
        controller.observe(KEY, [steps.step(1 + at % 8, controller.length_for(KEY, 1 + at % 8))])
        if (probe := controller.take_probe(KEY, 1 + at % 8, max_length=2)) is not None:
            assert probe.speculation_length <= 2
    assert controller.take_probe(KEY, 4, max_length=0) is None
    assert controller.context(KEY).main.choice.probe_s > 0.0


def test_a_probe_of_two_steps_is_paid_for_twice_and_for_the_change_there_and_back():
    for batch_size, at_zero in ((4, False), (8, True)):
        charged = []
        for num_steps in (1, 2):
            steps = Steps(11, acceptance=0.05 if at_zero else 0.7)
            controller = controller_for(steps)
            for _ in range(400):
                controller.observe(KEY, [steps.step(batch_size, controller.length_for(KEY, batch_size))])
            choice, bucket = controller.context(KEY).main.choice, controller.bucket_index(KEY, batch_size)
            choice.credit[bucket] = 4.0
            assert (choice.lengths[bucket] == 0) == at_zero
            assert controller.take_probe(KEY, batch_size, num_steps=num_steps) is not None
            charged.append(4.0 - choice.credit[bucket])
        assert charged[1] == pytest.approx(2.0 * charged[0] + CHANGE)


def test_a_debt_keeps_what_no_estimate_changes():
    """Where catching up is dear, a probe costs six steps: a debt that forgot it would be filled again at once."""
    steps = Steps(11, acceptance=0.05)
    controller = controller_for(steps)
    controller.observe(KEY, [steps.step(8, 0) for _ in range(400)], "w")
    context, bucket = controller.context(KEY), controller.bucket_index(KEY, 8)
    choice = context.main.choice
    assert choice.lengths[bucket] == 0
    context.resume_s = 5.0 * float(choice.step_s[bucket, 0])
    choice.credit[bucket] = CAP_STEPS_AT_ZERO
    assert controller.take_probe(KEY, 8, num_steps=2) is not None
    assert choice.credit[bucket] < CAP_STEPS_AT_ZERO - 5.0
    controller.observe(KEY, [steps.step(8, 0)], "w")
    assert choice.credit[bucket] < CAP_STEPS_AT_ZERO - 5.0 - CHANGE / 2


@pytest.mark.parametrize(("noise", "given_back"), [(0.05, 0.3), (0.3, 0.0)])
def test_given_back_is_what_a_probe_was_charged_and_no_more_and_nothing_for_noise(noise, given_back):
    steps = Steps(11)
    controller = controller_for(steps)
    controller.observe(KEY, [steps.step(4, 3) for _ in range(400)], "w")
    context, bucket = controller.context(KEY), controller.bucket_index(KEY, 4)
    choice, context.main.times.noise = context.main.choice, noise
    choice.assess(choice.tokens, context.main.times)
    other = int(choice.lengths[bucket]) + 1
    cell = np.array([bucket * choice.tokens.shape[1] + other] * 50)
    choice.credit[bucket] = 0.0
    choice.refund(cell, np.full(50, -0.5))
    assert choice.credit[bucket] == 0.0, "nothing was charged"
    choice.charge(bucket, 0.3, 1)
    choice.refund(cell, np.full(50, -0.5))
    assert choice.credit[bucket] == pytest.approx(given_back - 0.3)


def test_way_back_from_not_drafting():
    """Acceptance falls to 0.05 at a full batch until the table says 0, then returns: drafting comes back by probes."""
    steps = Steps(2, acceptance=0.05)
    controller = controller_for(Steps(2, acceptance=0.05))
    serve(controller, steps, 8, 800)
    assert controller.length_for(KEY, 8) == 0
    steps.acceptance = 0.9
    played = serve(controller, steps, 8, 800)
    back = next(i for i in range(len(played)) if min(played[i : i + 8]) > 0)
    assert back < 300
    assert controller.length_for(KEY, 8) >= 3


def test_a_profile_that_says_never_is_found_out():
    steps = Steps(3)
    controller = controller_for(steps, factor=4.0)
    assert controller.length_for(KEY, 4) == 0
    played = serve(controller, steps, 4, 400)
    assert played.index(next(length for length in played if length)) < 8  # the first probe comes at once
    assert controller.length_for(KEY, 4) >= 2


def test_stale_acceptance_after_a_pause_does_not_last():
    """The first steps after length 0 accept little, since the draft lags behind: it must not look low for good."""
    steps = Steps(4)
    controller = controller_for(Steps(4))
    serve(controller, steps, 4, 200)
    good = controller.length_for(KEY, 4)
    controller.observe(KEY, [StepObservation(4, good, steps.time(4, good), (4, *[0] * good)) for _ in range(6)])
    serve(controller, steps, 4, 400)
    assert steps.goodput(4, controller.length_for(KEY, 4)) >= 0.98 * steps.goodput(4, steps.best(4))


def test_an_arm_that_met_a_spike_is_tried_again():
    """One step of 50 times its time at the best length: the choice is the same a few steps later."""
    steps = Steps(5)
    controller = controller_for(Steps(5))
    serve(controller, steps, 4, 200)
    best = controller.length_for(KEY, 4)
    slow = steps.step(4, best)._replace(latency_s=50 * steps.time(4, best))
    controller.observe(KEY, [slow])
    serve(controller, steps, 4, 40)
    assert steps.goodput(4, controller.length_for(KEY, 4)) >= 0.99 * steps.goodput(4, best)


def test_leaving_zero_must_pay_for_catching_up():
    """A worker whose first step after length 0 takes 60 ms more: the cost is learned and stands against small gains."""
    steps = Steps(6)
    controller = controller_for(Steps(6))
    for _ in range(30):
        catch_up = steps.step(4, 2)._replace(latency_s=steps.time(4, 2) + 0.060, teaches_latency=False)
        controller.observe(KEY, [steps.step(4, 0), catch_up], "w")
    context = controller.context(KEY)
    assert context.resume_s == pytest.approx(0.060, rel=0.1)
    choice, times = context.main.choice, context.main.times
    choice.lengths[:] = 0
    gain = 0.5 * context.resume_s / (RESUME_HORIZON * float(choice.seconds[3, 0]))
    tokens = times.seconds() / float(choice.seconds[3, 0]) * np.exp(times.grid(times.variance))
    tokens[:, 1] *= 1.0 + MARGIN + gain
    tokens[:, 2:] = 1.0
    choice.decide(tokens, times, context.resume_s)
    assert choice.lengths[3] == 0
    choice.decide(tokens, times, 0.0)
    assert choice.lengths[3] == 1


def played_with_dear_drafts(batch: int, rounds: int) -> tuple[Steps, list[int]]:
    """Lengths by step, with a profile in which every draft takes six times as long, in groups of four.

    The first step after length 0 teaches no time.
    """
    steps = Steps(3)
    controller = controller_for(steps, factor=6.0)
    previous, played = 0, []
    for _ in range(rounds):
        group = []
        for _ in range(4):
            probe = controller.take_probe(KEY, batch)
            length = probe.speculation_length if probe else controller.length_for(KEY, batch)
            step = steps.step(batch, length)
            if previous == 0 and length > 0:
                step = step._replace(latency_s=step.latency_s + 0.02, teaches_latency=False)
            group.append(step)
            played.append(length)
            previous = length
        controller.observe(KEY, group)
    assert played[:8].count(0) >= 4, "the profile must have been believed"
    return steps, played


@pytest.mark.parametrize("batch", [4, 8, 16])
def test_times_that_are_wrongly_believed_to_be_long_do_not_keep_drafting_off(batch):
    steps, played = played_with_dear_drafts(batch, 500)
    assert 0 not in played[500:]
    assert steps.goodput(batch, played[-1]) >= 0.98 * steps.goodput(batch, steps.best(batch))


LIES = {
    "long lengths are cheap": lambda length, rng: 0.85**length,
    "drafting is dear": lambda length, rng: 1.0 if length == 0 else 1.8,
    "everything twice": lambda length, rng: 2.0,
    "noise": lambda length, rng: float(rng.uniform(0.3, 3.0)),
}


def loss_of_the_honest(lie: str, start: int) -> float:
    """Share of goodput that seven workers lose against the best lengths while the eighth lies from a round on."""
    rng, controller, steps = np.random.default_rng(7), controller_for(Steps(7)), Steps(7)
    lost = total = 0.0
    for round_ in range(start + 60):
        for worker in range(8):
            batch = (2, 6, 12, 24)[(round_ // 10 + worker) % 4]
            best, group = steps.goodput(batch, steps.best(batch)), []
            for _ in range(8):
                name = f"worker-{worker}"
                probe = controller.take_probe(KEY, batch, worker_id=name)
                length = probe.speculation_length if probe else controller.length_for(KEY, batch, name)
                report = steps.step(batch, length)
                if worker == 0 and round_ >= start:
                    report = report._replace(latency_s=report.latency_s * LIES[lie](length, rng))
                group.append(report)
                if worker and round_ >= start:
                    total += 1.0
                    lost += 1.0 - steps.goodput(batch, length) / best
            controller.observe(KEY, group, f"worker-{worker}")
    return lost / total


@pytest.mark.parametrize("lie", LIES)
def test_one_of_eight_workers_that_begins_to_lie_does_not_change_the_choice_of_the_others(lie):
    """Measured: a loss of 0.1%, as without the lies. The documented bound is 0.5%."""
    assert loss_of_the_honest(lie, start=12) < 0.005


def test_a_worker_that_lies_from_the_first_step_on_costs_little():
    """Before anything is known, nobody can tell who lies. Measured: 1% to 5% in the first 60 rounds."""
    assert loss_of_the_honest("everything twice", start=0) < 0.06
