"""Plans that copy are learned from what every step tells of texts and times, none for itself; probes are paid for before."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from speclen.bench.simulation.copying.machine import TWO_CORES, CopyingMachine, Outcome, report_of, time_of
from speclen.bench.simulation.copying.recorded import recorded_texts
from speclen.bench.simulation.copying.score import Play
from speclen.bench.simulation.copying.world import SCENARIOS, CopyWorld, Rows, Text
from speclen.controller.estimator.choice import CAP_STEPS, CAP_STEPS_AT_ZERO, LEAST_CHARGE, SHARE_AT_ZERO, least_cost
from speclen.controller.estimator.contexts.apart import _set_acceptance_apart
from speclen.controller.estimator.contexts.learning import _times_changed
from speclen.controller.estimator.core import ContextKey, Limits, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.copying import MEMORY_TOKENS, READ_AT_ONCE
from speclen.controller.estimator.plans.learning import plans_before
from speclen.controller.estimator.plans.plan import CopiedRun, Copies, Plan
from speclen.controller.estimator.plans.reviews import STEPS, OutputReview, Reviews
from speclen.controller.estimator.reports import read_by
from speclen.controller.estimator.times.steps import spans_of

KEY = ContextKey("t", "d", "cpu", "float32")
LIMITS = Limits(8, 4, 16)
REPEATING = Text(begins=0.05, mean_length=30.0, by_chance=0.3, chance_right=0.2, draft_right=(0.5, 0.8))
ORDINARY = Text(begins=0.0005, mean_length=10.0, by_chance=0.5, chance_right=0.1, draft_right=(0.6, 0.8))
MACHINE = CopyingMachine(0.01, 0.0015, 0.00002, 0.0001, 16.0, 0.0002, np.ones((9, 40)))


class Played:
    """An estimator that serves rows of one text on a machine, alone, batch size 4 and 8 in turn."""

    def __init__(self, text: Text, limits: Limits = LIMITS, seed: int = 0, estimator: Estimator | None = None) -> None:
        self.estimator, self.limits = estimator or Estimator(), limits
        self.estimator.add_context(KEY, limits)
        self.rng = np.random.default_rng(seed)
        self.rows = Rows(text, limits.max_batch_size, self.rng)
        self.machine = MACHINE
        self.num_steps, self.spent_s, self.tokens, self.plans = 0, 0.0, 0.0, list[Plan]()

    def plan(self, batch: int) -> Plan:
        table = self.estimator.table(KEY, "w")
        return next(
            choice.plan or Plan(choice.speculation_length)
            for choice in table.choices
            if batch <= choice.bucket.batch_max
        )

    def step(self, batch: int, plan: Plan) -> StepObservation:
        done = self.rows.step(plan, batch)
        seconds = time_of(self.machine, done)[0]
        self.plans.append(plan)
        self.spent_s += seconds
        self.tokens += float(done.tokens.sum())
        return report_of(plan, done, seconds * float(np.exp(0.05 * self.rng.standard_normal())), self.machine)

    def serve(self, num_groups: int, batches: tuple[int, ...] = (4, 8)) -> None:
        """Groups of eight steps; a probe is taken after each, and done first thing in the next."""
        probe = None
        for number in range(num_groups):
            batch = batches[number // 10 % len(batches)]
            group = []
            for _ in range(8):
                plan = self.plan(batch)
                if probe is not None and probe.bucket.batch_min <= batch <= probe.bucket.batch_max:
                    plan = probe.plan or Plan(probe.speculation_length)
                probe = None
                group.append(self.step(batch, plan))
            self.estimator.observe(KEY, group, "w")
            self.num_steps += 8
            limits = self.limits.max_speculation_length, "w", self.limits.max_copied_tokens
            probe = self.estimator.take_probe(KEY, batch, *limits)


def tokens_under(text: Text, plan: Plan) -> float:
    """Tokens per row and step in the long run."""
    rows = Rows(text, 400, np.random.default_rng(9))
    return float(np.mean([rows.step(plan, 400).tokens.mean() for _ in range(120)][40:]))


def test_copying_is_found_where_texts_repeat_themselves():
    played = Played(REPEATING)
    played.serve(120)
    assert all(played.plan(batch).copy_min_match for batch in (4, 8)), [str(played.plan(batch)) for batch in (4, 8)]


@pytest.mark.parametrize("text", [REPEATING, ORDINARY])
def test_what_is_read_tells_whether_to_copy_before_anything_was_copied(text):
    """Half of each, of 500 steps that drafted: the plan that is chosen is a good one where texts repeat themselves."""
    played = Played(text)
    for number in range(60):
        played.estimator.observe(KEY, [played.step((4, 8)[number % 2], Plan(number % 4)) for _ in range(8)], "w")
    assert not any(plan.copy_min_match for plan in played.plans)
    chosen = [played.plan(batch) for batch in (4, 8)]
    assert all(bool(plan.copy_min_match) == (text is REPEATING) for plan in chosen), [str(plan) for plan in chosen]


def test_where_nothing_repeats_little_is_lost():
    """A plan that copies from long matches on is a length there, at the same cost; one that copies what is wrong is not."""
    played = Played(ORDINARY)
    played.serve(60)
    played.tokens, played.spent_s = 0.0, 0.0
    played.serve(60)
    best = [Played(ORDINARY, seed=1) for _ in range(5)]
    for length, other in enumerate(best):
        for number in range(480):
            other.step((4, 8)[number // 80 % 2], Plan(length))
    assert played.spent_s / played.tokens < 1.06 * min(other.spent_s / other.tokens for other in best)


def test_a_plan_that_was_never_played_is_predicted_from_another():
    """What is behind a match of 5 says what a plan that copies from 2 or from 8 on will do, and how far."""
    played = Played(REPEATING)
    for number in range(60):
        plan = Plan(number % 3) if number < 6 else Plan(2, 3, 16)
        played.estimator.observe(KEY, [played.step(8, plan) for _ in range(8)], "w")
    context = played.estimator.context(KEY)
    assert context.main.plans is not None
    known = context.main.plans.assess(np.array([7]), context.tokens(context.main)[[7]])
    for plan in (Plan(2, 3, 16), Plan(2, 5, 16), Plan(1, 3, 8), Plan(2, 8, 8)):
        expected = float(known.tokens[0, context.main.plans.place[plan]])
        assert expected == pytest.approx(tokens_under(REPEATING, plan), rel=0.15), str(plan)


@pytest.mark.parametrize("text", [REPEATING, ORDINARY])
def test_exploring_stays_within_what_was_earned(text):
    played = Played(text)
    played.serve(60)
    choice = played.estimator.context(KEY).main.choice
    longest = float(choice.seconds.max())
    start = 2 * (CAP_STEPS + CAP_STEPS_AT_ZERO) * longest
    assert choice.probe_s <= SHARE_AT_ZERO * played.spent_s + start


def served_at_8_rows(text: Text = REPEATING):
    """Plans, lengths and tokens by length of the last bucket, after a while."""
    played = Played(text)
    context = played.estimator.context(KEY)
    assert context.main.plans is not None
    played.serve(40)
    return context.main.plans, context.main.choice, context.tokens(context.main)[[7]]


def test_a_probe_that_resumes_drafts_pays_for_the_catching_up():
    """Where a poor plan that copies alone is played, one with drafts is tried once the account is full, and is charged."""
    plans, choice, tokens = served_at_8_rows(replace(REPEATING, draft_right=(0.85, 0.9)))
    plans.chosen[7] = Plan(0, 8, 4)
    resume_s = 3.0 * float(plans.assess(np.array([7]), tokens).seconds[0, plans.place[Plan(0, 8, 4)]])
    for credit, may_draft in ((0.9 * CAP_STEPS, False), (CAP_STEPS, True)):
        choice.credit[7], plans.aside[7] = credit, 0.0
        plan = plans.probe(7, tokens, choice, (4, 16), resume_s)
        assert plan is not None
        assert bool(plan.draft_length) == may_draft, str(plan)
        assert choice.credit[7] == pytest.approx(credit - LEAST_CHARGE - 3.0 * may_draft)
    choice.credit[7] = CAP_STEPS
    assert plans.probe(7, tokens, choice, (4, 16), resume_s, num_steps=2) == plan
    assert choice.credit[7] == pytest.approx(CAP_STEPS - least_cost(2) - 3.0)
    plans.chosen[7] = Plan(1, 8, 4)  # it drafts already
    choice.credit[7] = 0.9 * CAP_STEPS
    plan = plans.probe(7, tokens, choice, (4, 16), resume_s)
    assert plan is not None
    assert plan.draft_length
    assert choice.credit[7] + plans.aside[7] == pytest.approx(0.9 * CAP_STEPS - LEAST_CHARGE)


def test_half_of_what_is_earned_is_kept_for_plans_that_draft_another_length():
    """Plans that differ only in how they copy cost next to nothing: they spent it all, and no other length was tried."""
    plans, choice, tokens = served_at_8_rows(drafting(0.6))
    known = plans.assess(np.array([7]), tokens)
    goodput = np.where(plans.lengths[plans.length_at] > 0, known.tokens[0] / known.seconds[0], 0.0)
    played = plans.chosen[7] = plans.grid[int(goodput.argmax())]
    plans.aside[7] = 0.0
    near, far = [], []
    for _ in range(400):
        choice.earn(np.array([7]), np.array([20.0]))
        before = choice.credit[7] + plans.aside[7]
        plan = plans.probe(7, tokens, choice, (4, 16), 0.0)
        if plan is not None:
            charged = before - choice.credit[7] - plans.aside[7]
            assert charged >= LEAST_CHARGE - 1e-9
            (near if plan.draft_length == played.draft_length else far).append(charged)
    assert near
    assert far
    assert sum(far) > 0.3 * sum(near + far)


def drafting(rate: float) -> Text:
    return replace(ORDINARY, draft_right=(rate, rate + 0.05))


def test_where_copies_alone_are_played_drafts_are_tried_that_pay_again():
    played = Played(drafting(0.02))
    played.serve(200, (8,))
    assert played.plan(8).draft_length == 0
    played.rows.text = drafting(0.9)
    played.serve(200, (8,))
    assert played.plan(8).draft_length


def test_a_plan_that_drafts_is_left_when_the_draft_becomes_slow_and_comes_back_with_it():
    played = Played(drafting(0.8))
    played.serve(150, (8,))
    assert played.plan(8).draft_length
    played.machine = replace(MACHINE, draft_s=8.0 * MACHINE.draft_s, draft_row_s=8.0 * MACHINE.draft_row_s)
    played.serve(400, (8,))
    assert played.plan(8).draft_length == 0
    played.machine = MACHINE
    played.serve(600, (8,))
    assert played.plan(8).draft_length


def test_a_change_of_times_is_counted_once_for_plans_and_lengths():
    """What steps of a plan took beyond the surface was not moved with it, so all lengths were moved once more, and again."""
    played = Played(REPEATING)
    played.serve(60)
    main = played.estimator.context(KEY).main
    before = main.choice.seconds[7].copy()
    played.machine = replace(MACHINE, bumps=2.5 * MACHINE.bumps)
    played.serve(100)
    assert main.choice.seconds[7] / before == pytest.approx(np.full(5, 2.5), rel=0.2)


def test_groups_that_share_step_times_tell_them_of_their_copies_as_long_as_they_have_workers():
    """Once, a worker set apart in acceptance alone took the others' place there, and kept it when it had gone."""
    played = Played(REPEATING)
    estimator = played.estimator
    played.serve(60)
    context = estimator.context(KEY)
    estimator.observe(KEY, [played.step(4, Plan(2))], "v")
    _set_acceptance_apart(context, "v")
    estimator.observe(KEY, [played.step(4, Plan(0, 3, 8)) for _ in range(40)], "v")
    main, apart, times = context.main, context.group_of("v"), context.times[0]
    assert (main.times, apart.times) == (times, times)
    assert times.beside == [main.plans.times.told, apart.plans.times.told]
    assert len(main.plans.times.told()[1])
    assert apart.plans.times.evidence.any()
    before = [each.plans.times.evidence[..., 0].sum() for each in (main, apart)]
    _times_changed(context, apart, 1.0)
    assert all(
        each.plans.times.evidence[..., 0].sum() < 0.1 * was for each, was in zip((main, apart), before, strict=True)
    )
    for _ in range(300):
        estimator.observe(KEY, [played.step(4, Plan(0, 3, 8))], "w")
    assert "v" not in context.workers.peers
    assert times.beside == [main.plans.times.told]


def test_the_plan_before_a_step_is_that_of_its_own_worker():
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    plans = estimator.context(KEY).main.plans
    assert plans is not None
    copied = Plan(2, 3, 8)

    def told(plan: Plan) -> StepObservation:
        copying = Copies(copied, 4, 4, 8, ()) if plan.copy_min_match else None
        return StepObservation(4, plan.draft_length, 0.01, (4,) + (0,) * plan.draft_length, 9.0, copying=copying)

    played = [Plan(2), copied, Plan(3), copied]
    steps = [told(plan) for plan in played]
    assert plans_before(plans, steps, spans_of(["a", "a", "b", "b"])) == [Plan(), Plan(2), Plan(), Plan(3)]
    assert plans_before(plans, steps[:2], spans_of(["b", "a"])) == [copied, copied], "the next group goes on"


def test_a_worker_without_a_draft_model_learns_to_copy():
    played = Played(REPEATING, Limits(8, 0, 16))
    played.serve(80)
    assert all(played.plan(batch).copy_min_match for batch in (4, 8))
    assert not any(plan.draft_length for plan in played.plans)


def test_a_worker_that_cannot_copy_is_never_asked_to():
    played = Played(REPEATING, Limits(8, 4, 0))
    played.serve(40)
    assert not any(plan.copy_min_match for plan in played.plans)


def test_a_stored_state_goes_on_with_the_same_plans():
    played = Played(REPEATING)
    played.serve(50)
    first = played.estimator
    second = Estimator()
    states = [json.loads(json.dumps(each)) for each in (first.export_state(KEY), first.export_pair_state(KEY.pair))]
    second.restore(KEY, LIMITS, *states)
    assert second.table(KEY) == first.table(KEY)
    for number in range(30):
        group = [played.step((4, 8)[number % 2], played.plan((4, 8)[number % 2])) for _ in range(8)]
        outcomes = [each.observe(KEY, group, "w") for each in (first, second)]
        assert outcomes[0] == outcomes[1]
        assert first.take_probe(KEY, 4, 4, "w", 16) == second.take_probe(KEY, 4, 4, "w", 16)


def test_a_state_of_before_plans_is_used():
    played = Played(REPEATING)
    played.serve(10)
    state, pair = played.estimator.export_state(KEY), played.estimator.export_pair_state(KEY.pair)
    del state["plans"], pair["copying"]
    after = Estimator()
    after.restore(KEY, LIMITS, state, pair)
    assert after.context(KEY).main.times.known
    assert after.context(KEY).main.plans is not None


def test_workers_that_come_to_copy_keep_what_is_believed_of_lengths():
    played = Played(REPEATING, Limits(8, 4, 0))
    played.serve(30)
    before = played.estimator.table(KEY)
    played.estimator.add_context(KEY, LIMITS)
    assert played.estimator.table(KEY) == before
    played.limits = LIMITS
    played.serve(100)
    assert any(plan.copy_min_match for plan in played.plans)


@pytest.mark.parametrize("seed", range(5))
def test_no_report_of_copying_breaks_it(seed):
    """Whatever numbers pass the checks: all estimates stay numbers, and no table fails."""
    rng = np.random.default_rng(seed)
    estimator = Estimator()
    estimator.add_context(KEY, LIMITS)
    for _ in range(60):
        group = []
        for _ in range(4):
            batch, length = int(rng.integers(1, 9)), int(rng.integers(0, 5))
            rows = int(rng.integers(0, batch + 1))
            match, most = int(rng.integers(1, 17)), int(rng.integers(1, 65))
            proposed = int(rng.integers(1, most + 1))
            run = CopiedRun(match, proposed, int(rng.integers(0, proposed + 1)), rows)
            plan = Plan(length, int(rng.integers(1, match + 1)), most, bool(length) and rng.random() < 0.2)
            fed = int(rng.integers(batch, batch * 80))
            copies = Copies(plan, batch, batch - rows, fed, (run,) if rows else ())
            seconds = float(np.exp(rng.uniform(-13, 8)))
            histogram = tuple(rng.multinomial(batch, np.ones(length + 1) / (length + 1)).tolist())
            told = None if rng.random() < 0.3 else copies
            group.append(
                StepObservation(batch, length, seconds, histogram, 100.0, told is None, told is None, (), copying=told)
            )
        estimator.observe(KEY, group, "w")
        estimator.take_probe(KEY, None, 4, "w", 16)
        for choice in estimator.table(KEY).choices:
            assert choice.ms_per_token is None or np.isfinite(choice.ms_per_token)
    for plans in estimator.plan_estimates(KEY).values():
        assert all(np.isfinite(shown.estimate.ms_per_token_high) for shown in plans)


def test_the_simulated_world_repeats_itself_as_it_says():
    world = CopyWorld(SCENARIOS[0], 3, 100)
    rows = Rows(world.text, 200, np.random.default_rng(0))
    done: Outcome = rows.step(Plan(0, 1, 8), 200)
    assert (done.copied <= done.proposed).all()
    assert (done.proposed[done.match == 0] == 0).all()


def test_simulated_plans_come_near_to_a_clairvoyants():
    """A short run of few seeds; the figures of docs/policy.md are of longer ones."""
    scenario = next(each for each in SCENARIOS if each.name == "no draft model")
    scores = [Play(CopyWorld(scenario, seed, 600, max_batch=8), seed).score()[0] for seed in (100, 101)]
    assert min(scores) > 85.0, scores


@pytest.mark.parametrize("plan", [Plan(), Plan(5), Plan(0, 1, 16), Plan(3, 2, 8)])
def test_recorded_rows_put_out_their_texts_and_no_more(plan):
    texts = recorded_texts("mixed")
    rows = texts.rows(64, np.random.default_rng(0))
    for _ in range(40):
        left = texts.left[rows.place]
        done = rows.step(plan, 64)
        assert (done.tokens <= left).all()
        assert (done.copied <= done.proposed).all()
        assert (done.proposed <= plan.copy_max_tokens).all()
        assert (done.drafted[done.proposed > 0] == 0).all()
        assert (done.drafted <= plan.draft_length).all()


@pytest.mark.parametrize(
    ("taught", "reads"),
    [
        (Plan(2, 2, 16), 0),
        (Plan(3, 3, 8), 0),
        (Plan(3), 1),
        (Plan(2, 2, 16), 1),
        (Plan(5, 5, 16), 1),
        (Plan(2, 2, 16), 40),
    ],
)
def test_on_recorded_texts_one_plan_tells_what_the_others_put_out(taught, reads):
    """Texts end in the middle of what is copied, and loop for long: a walk that forgets either is off by a fifth.

    Where workers tell what they read, lengths tell it as well. reads: steps after which they do, 0 for never.
    """
    texts, played = recorded_texts("mixed"), Played(REPEATING, Limits(32, 8, 16))
    rows, saved = texts.rows(32, np.random.default_rng(0)), []
    for plan in (Plan(3), Plan(6), taught):
        for _ in range(60):
            steps = [report_of(plan, rows.step(plan, 32), 0.02, TWO_CORES) for _ in range(8)]
            saved += steps
            told = [step._replace(read=()) for step in steps]
            if reads and len(saved) >= reads:
                told[-1] = told[-1]._replace(read=read_by(saved))
                saved = []
            played.estimator.observe(KEY, told, "w")
    context = played.estimator.context(KEY)
    [group] = context.groups.values()
    group.plans.assess(np.array([31]), context.tokens(group)[[31]])
    group.plans.since_walked = 1e9
    walk, alone = group.plans.now(), group.plans.usual[group.plans.length_at]
    promised = walk.copied + (1.0 - walk.share) * alone
    errors = []
    for place in range(0, len(promised), 9):
        told = texts.rows(512, np.random.default_rng(1))
        tokens = [told.step(group.plans.grid[place], 512).tokens.mean() for _ in range(60)][20:]
        errors.append(np.log(promised[place] / np.mean(tokens)))
    assert abs(np.mean(errors)) < (0.04 if reads else 0.08)
    assert np.std(errors) < (0.04 if reads else 0.1)


def truth_of(mix: str) -> Reviews:
    """Steps that every plan takes through all recorded texts of a mix."""
    texts, reviews = recorded_texts(mix), Reviews(8, 3)
    for begin in texts.begins.tolist():
        review = texts.review(begin)
        reviews.sums[review.request_class] += reviews.count(review).sums
        reviews.tokens[review.request_class] += len(review.matches)
    return reviews


@pytest.mark.parametrize("mix", ["mixed", "copying"])
@pytest.mark.parametrize("played", [Plan(3, 3, 8), Plan(0, 3, 8), Plan(4), Plan(0)])
def test_outputs_tell_what_every_plan_makes_of_them_whichever_is_played(mix, played):
    """Tokens per step of all lengths and plans after 250 outputs, of which each is worth some 30% of scatter.

    Steps of one plan alone say 0.92 of length 3 beside plans that copy, and less of requests that are unlike.
    """
    text, truth, errors = recorded_texts(mix), truth_of(mix), []
    tokens = truth.tokens.sum() / truth.sums[:, :, 0].sum(axis=0)
    for seed in range(3):
        estimator, rows = Estimator(), text.rows(8, np.random.default_rng(seed))
        estimator.add_context(KEY, Limits(16, 8, 16))
        context = estimator.context(KEY)
        while context.main.acceptance.reviews.num_outputs < 250:
            group = [report_of(played, rows.step(played, 8), 0.01, MACHINE) for _ in range(10)]
            estimator.observe(KEY, group, "w")
        assert context.main.plans is not None
        lengths = context.tokens(context.main)[[7]]
        plans = context.main.plans.assess(np.array([7]), lengths).tokens
        errors.append(np.log(np.append(lengths[0], plans[0]) / tokens))
    told = np.mean(errors, axis=0)
    assert abs(told).max() < 0.07
    assert abs(told.mean()) < 0.035


def test_a_class_of_requests_whose_outputs_become_others_is_counted_anew():
    """Greedy texts of which every draft is right, then none: found within a dozen outputs, and not by those alike."""
    right, wrong = (OutputReview(0, *[bytes(64)] * 3, bytes([at] * 64)) for at in (1, 0))
    reviews = Reviews(8, 3)
    reviews.learn([(reviews.count(right), 1.0)] * 300)
    assert reviews.num_outputs > 200
    taught = np.ones((3, 9))
    before = float(reviews.per_token(taught)[0, 4, STEPS])
    reviews.learn([(reviews.count(wrong), 1.0)] * 12)
    assert reviews.num_outputs < 40
    assert before == pytest.approx(0.21, abs=0.02)
    reviews.learn([(reviews.count(wrong), 1.0)] * 60)
    assert reviews.per_token(taught)[0, 4, STEPS] > 0.75


def test_a_part_of_an_output_counts_for_all_of_it():
    """Of long hot outputs there is time for an eighth: for all that they are as many tokens."""
    part, short = (OutputReview(2, *[bytes(8)] * 3, bytes([at] * 8)) for at in (0, 1))
    reviews = Reviews(4, 3)
    reviews.learn([(reviews.count(part._replace(num_output_tokens=64)), 1.0), (reviews.count(short), 1.0)] * 300)
    rates = reviews.per_token(np.ones((3, 5)))[2, 4, STEPS]
    assert rates == pytest.approx((8 / 8 * 64 + 2 / 8 * 8) / 72, abs=0.02)
    claimed = reviews.count(part._replace(num_output_tokens=2**31))
    assert claimed.num_tokens == 1024, "whoever makes one up has no more say than with a long one"


def observe_classes(estimator: Estimator, rows: tuple[int, int], num_reports: int, reviewed: bool = True) -> None:
    """Reports at length 4: greedy rows, all of whose drafts are right, and hot ones, none of whose are; outputs of 64."""
    greedy, hot = rows
    runs = ((0, (0, 0, 0, 0, greedy)), (2, (hot, 0, 0, 0, 0)))
    outputs = [OutputReview(kind, *[bytes(64)] * 3, bytes([at] * 64)) for kind, at in ((0, 1), (2, 0))]
    for at in range(num_reports):
        told = tuple(outputs[:1] if at % 2 or not reviewed else outputs[1:])
        step = StepObservation(sum(rows), 4, 0.01, (hot, 0, 0, 0, greedy), 100.0, by_class=runs, reviews=told)
        estimator.observe(KEY, [step], "w")


def tokens_of(estimator: Estimator, batch: int) -> float:
    """Expected of a row and step at length 4."""
    context = estimator.context(KEY)
    return float(context.tokens(context.main)[context.main.times.bucket_of[batch], 4])


def test_rows_of_a_class_tell_of_as_many_tokens_as_they_put_out():
    """Half of the rows put out five tokens a step, the other half one: of six tokens, five are of the first."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    observe_classes(estimator, (4, 4), 1500)
    shares = estimator.context(KEY).classes()[estimator.context(KEY).band_of_batch[8]]
    assert shares == pytest.approx([5 / 6, 0.0, 1 / 6], abs=0.02)
    assert tokens_of(estimator, 8) == pytest.approx(3.0, rel=0.05), "as before, as long as nobody plays something else"


def test_a_row_puts_out_one_token_a_step_at_least():
    """Story: a mean of ones came out as 0.9999999999999999, and the database refused the row."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    context = estimator.context(KEY)
    reviews = context.main.acceptance.reviews
    reviews.learn([(reviews.count(OutputReview(0, *[bytes(64)] * 3, bytes(64))), 1.0)] * 50)
    dice = np.random.default_rng(1)
    for _ in range(200):
        context.by_class[:] = dice.random(context.by_class.shape) * 1000
        assert context.tokens(context.main).min() >= 1.0
    assert reviews.num_outputs > 0


def test_classes_stay_told_apart_however_many_outputs_were_reviewed():
    """One in eight rows is hot, and every other review of a hot one: that is no reason to take half of the rows for hot."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    observe_classes(estimator, (7, 1), 3000)
    assert estimator.acceptance(KEY.pair).reviews.num_outputs > 500
    assert tokens_of(estimator, 8) == pytest.approx((7 * 5 + 1) / 8, rel=0.05)


def test_another_mix_of_classes_is_followed_at_once():
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    observe_classes(estimator, (8, 0), 1500)
    assert tokens_of(estimator, 8) > 4.5
    observe_classes(estimator, (0, 8), 1200)
    assert tokens_of(estimator, 8) < 1.6


def test_nobody_has_read_more_than_it_put_out():
    """One report said that a million tokens stood behind long matches, all of them right, and nothing else was known."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    copying = estimator.context(KEY).copying
    step = StepObservation(8, 0, 0.01, (8,), 100.0, read=((0, 8, 0),))
    for at in range(4000):  # told once in a while, and as much as was put out
        told = ((0, 320, 0),) if at % 40 == 39 else ()
        estimator.observe(KEY, [step._replace(read=told)], "w")
    kept = float(copying.matches[0, 0])
    assert kept == pytest.approx(MEMORY_TOKENS * (1.0 - np.exp(-32_000 / MEMORY_TOKENS)), rel=0.02)
    estimator.observe(KEY, [step._replace(read=((16, 2**20, 2**20),))], "liar")
    assert copying.matches[0, 16] == pytest.approx(READ_AT_ONCE, rel=0.01)
    assert copying.matches[0, 0] > 0.85 * kept
    for _ in range(100):
        estimator.observe(KEY, [step._replace(read=((16, 2**20, 2**20),))], "liar")
    assert copying.matches[0, 16] < READ_AT_ONCE + 101 * 2 * 8


def test_reviews_that_cease_are_believed_no_longer_than_steps_contradict_them():
    """They cease where one fails, where requests are such as are not reviewed, and where other workers take over."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    right, wrong = (
        StepObservation(8, 4, 0.01, runs, 100.0, by_class=((0, runs),)) for runs in ((0, 0, 0, 0, 8), (8, 0, 0, 0, 0))
    )
    observe_classes(estimator, (8, 0), 1500)
    outputs = estimator.acceptance(KEY.pair).reviews.outputs
    known = outputs[0]
    assert (tokens_of(estimator, 8) > 4.5, known > 300) == (True, True)
    for _ in range(500):
        estimator.observe(KEY, [right], "w")
    assert outputs[0] == known, "a pause is none yet"
    for _ in range(6000):
        estimator.observe(KEY, [wrong], "w")
    assert outputs[0] < 0.05 * known
    assert tokens_of(estimator, 8) < 1.7
    observe_classes(estimator, (8, 0), 3000)
    assert (tokens_of(estimator, 8) > 4.5, outputs[0] > 300) == (True, True), "they are, once they come again"


def test_reviews_of_a_large_fleet_do_not_cease_because_its_groups_are_many_steps():
    reviews = Reviews(4, 1)
    outputs = [(reviews.count(OutputReview(0, *[bytes(64)] * 3, bytes([1] * 64))), 1.0)] * 30
    for _ in range(50):
        reviews.learn(outputs)
        reviews.pass_by(np.array([20_000.0]))
    assert reviews.outputs[0] > 400.0
    for _ in range(60):
        reviews.pass_by(np.array([20_000.0]))
    assert reviews.outputs[0] < 5.0


def test_a_class_that_nobody_reviews_is_believed_what_its_steps_say():
    """As are rows with penalties: all that is reviewed is greedy."""
    estimator = Estimator()
    estimator.add_context(KEY, Limits(16, 8, 16))
    observe_classes(estimator, (2, 6), 1500, reviewed=False)
    assert tokens_of(estimator, 8) == pytest.approx((2 * 5 + 6) / 8, rel=0.07)
    plans = estimator.context(KEY).main.plans
    assert plans is not None
    lengths = estimator.context(KEY).tokens(estimator.context(KEY).main)
    bucket = estimator.context(KEY).main.times.bucket_of[8]
    tokens = plans.assess(np.array([bucket]), lengths[[bucket]]).tokens[0]
    assert tokens[plans.place[Plan(4, 3, 8)]] == pytest.approx((2 * 5 + 6) / 8, rel=0.1), "nothing repeats itself"


def test_reviews_go_through_the_stored_state():
    played, text = Estimator(), recorded_texts("mixed")
    played.add_context(KEY, Limits(16, 8, 16))
    rows = text.rows(8, np.random.default_rng(0))
    for _ in range(40):
        group = [report_of(Plan(3), rows.step(Plan(3), 8), 0.01, MACHINE) for _ in range(10)]
        played.observe(KEY, group, "w")
    assert played.acceptance(KEY.pair).reviews.num_outputs > 10
    again = Estimator()
    states = [json.loads(json.dumps(each)) for each in (played.export_state(KEY), played.export_pair_state(KEY.pair))]
    again.restore(KEY, Limits(16, 8, 16), *states)
    assert (again.acceptance(KEY.pair).tokens == played.acceptance(KEY.pair).tokens).all()
    assert again.table(KEY) == played.table(KEY)
