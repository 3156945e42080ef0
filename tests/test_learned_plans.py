"""Plans that copy are learned from what every step tells of texts and times, none for itself; probes are paid for before."""

from __future__ import annotations

import json

import numpy as np
import pytest

from speclen.bench.simulation.copying.machine import TWO_CORES, CopyingMachine, Outcome, report_of, time_of
from speclen.bench.simulation.copying.recorded import recorded_texts
from speclen.bench.simulation.copying.score import Play
from speclen.bench.simulation.copying.world import SCENARIOS, CopyWorld, Rows, Text
from speclen.controller.estimator.choice import CAP_STEPS, CAP_STEPS_AT_ZERO, LEAST_CHARGE, SHARE_AT_ZERO
from speclen.controller.estimator.core import ContextKey, Limits, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.estimator.plans.learning import HARDER_STEPS, plans_before
from speclen.controller.estimator.plans.learning import _in_the_long_run as in_the_long_run_of_one
from speclen.controller.estimator.plans.plan import CopiedRun, Copies, Plan
from speclen.controller.estimator.plans.stints import (
    STINT_CAP_STEPS,
    STINT_SHARE,
    STINT_STEPS,
    UNASKED_S,
    Stint,
    Stints,
    Try,
)
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
        seconds = time_of(MACHINE, done)[0]
        self.plans.append(plan)
        self.spent_s += seconds
        self.tokens += float(done.tokens.sum())
        return report_of(plan, done, seconds * float(np.exp(0.05 * self.rng.standard_normal())), MACHINE)

    def serve(self, num_groups: int) -> None:
        """Groups of eight steps; a probe is taken after each, and done first thing in the next, and on."""
        probe, left = None, 0
        for number in range(num_groups):
            batch = (4, 8)[number // 10 % 2]
            group = []
            for _ in range(8):
                plan = self.plan(batch)
                if probe is not None and left and probe.bucket.batch_min <= batch <= probe.bucket.batch_max:
                    plan, left = probe.plan or Plan(probe.speculation_length), left - 1
                else:
                    left = 0
                group.append(self.step(batch, plan))
            self.estimator.observe(KEY, group, "w")
            self.num_steps += 8
            if not left:
                limits = self.limits.max_speculation_length, "w", self.limits.max_copied_tokens
                probe = self.estimator.take_probe(KEY, batch, *limits)
                left = 0 if probe is None else max(probe.num_steps, 1)


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
    start = (2 * (CAP_STEPS + CAP_STEPS_AT_ZERO) + STINT_CAP_STEPS) * longest
    assert choice.probe_s <= (SHARE_AT_ZERO + STINT_SHARE) * played.spent_s + start


def served_at_8_rows():
    """Plans, lengths and tokens by length of the last bucket, after a while of repeating text."""
    played = Played(REPEATING)
    context = played.estimator.context(KEY)
    assert context.main.plans is not None
    context.main.plans.stints.credit_s = -UNASKED_S  # they would tell of lengths
    played.serve(40)
    return context.main.plans, context.main.choice, context.tokens(context.main)[[7]]


def test_a_probe_that_resumes_drafts_pays_for_the_catching_up():
    """Where a poor plan that copies alone is played, one with drafts is tried once the account is full, and is charged."""
    plans, choice, tokens = served_at_8_rows()
    plans.chosen[7] = Plan(0, 8, 4)
    resume_s = 3.0 * float(plans.assess(np.array([7]), tokens).seconds[0, plans.place[Plan(0, 8, 4)]])
    for credit, may_draft in ((0.9 * CAP_STEPS, False), (CAP_STEPS, True)):
        choice.credit[7], plans.stints.credit_s = credit, 0.0
        plan = plans.probe(7, tokens, choice, (4, 16), resume_s)
        assert plan is not None
        assert bool(plan.draft_length) == may_draft, str(plan)
        assert choice.credit[7] == pytest.approx(credit - LEAST_CHARGE - 3.0 * may_draft)
    choice.credit[7] = CAP_STEPS
    assert plans.probe(7, tokens, choice, (4, 16), resume_s, num_steps=2) == plan
    assert choice.credit[7] == pytest.approx(CAP_STEPS - 2 * LEAST_CHARGE - 3.0)
    plans.chosen[7] = Plan(1, 8, 4)  # it drafts already
    choice.credit[7] = 0.9 * CAP_STEPS
    plan = plans.probe(7, tokens, choice, (4, 16), resume_s)
    assert plan is not None
    assert plan.draft_length
    assert choice.credit[7] == pytest.approx(0.9 * CAP_STEPS - LEAST_CHARGE)


def test_the_best_length_has_stints_whatever_is_believed_of_it():
    """Both are known from unlike steps: what is wrongly believed of lengths would keep plans in their place for ever."""
    plans, choice, tokens = served_at_8_rows()
    plans.chosen[7] = best = plans.chosen[7] or Plan(2, 3, 8)
    known = plans.assess(np.array([7]), tokens)
    seconds = float(known.seconds[0, plans.place[best]])
    promised = float(known.tokens[0, plans.place[best]]) / seconds
    length, stints = 1 + int(choice.goodput[7, 1:].argmax()), plans.stints
    loss = float(choice.seconds[7, length]) / seconds * (1.0 - float(choice.goodput[7, length]) / promised)
    assert loss > 0.05, "dear, so that no hope would ask for it"
    steps = min(STINT_STEPS, int(STINT_CAP_STEPS / loss))
    cost_s = steps * loss * seconds
    choice.credit[7], stints.credit_s, before = 0.0, 0.0, choice.probe_s
    assert plans.probe(7, tokens, choice, (4, 16), 0.0) is None
    stints.earn(0.99 * cost_s / STINT_SHARE)
    assert plans.probe(7, tokens, choice, (4, 16), 0.0) is None, "it is saved up for"
    stints.earn(0.02 * cost_s / STINT_SHARE)
    stint = plans.probe(7, tokens, choice, (4, 16), 0.0)
    assert isinstance(stint, Stint)
    assert (stint.plan, stint.num_steps) == (Plan(length), steps)
    assert stint.first <= 7 == stint.last
    assert choice.probe_s - before == pytest.approx(cost_s)
    assert stints.credit_s == pytest.approx(0.01 * cost_s)
    assert plans.probe(7, tokens, choice, (4, 16), 0.0) is None


def test_short_steps_leave_what_is_saved_up_for_long_ones():
    """Where batches are small for a while, their stints must not take all, or large ones would never have any."""
    plans, choice, _ = served_at_8_rows()
    stints = Stints(plans.times.rows)
    long = Try(Plan(2, 3, 8), 0.0, float(choice.seconds[7].max()), 1.2 * float(choice.goodput[7].max()))
    assert stints.take(7, choice, long, 4, 0.0) is not None
    stints.credit_s = cost_s = STINT_CAP_STEPS * long.seconds
    short = long._replace(seconds=0.1 * float(choice.seconds[0].min()), goodput=1e3 * float(choice.goodput[0].max()))
    stints.take(0, choice, short, 4, 0.0)
    assert stints.credit_s >= cost_s - STINT_CAP_STEPS * short.seconds


def test_what_a_stint_costs_can_be_saved_up_or_it_is_not_taken():
    plans, choice, _ = served_at_8_rows()
    length, seconds = int(choice.lengths[7]), float(choice.seconds[7].max())
    for better in (1.0, 1.001, 1.1, 2.0, 50.0, 1e9):
        usual = Try(Plan(2, 3, 8), 0.0, seconds, better * float(choice.goodput[7, length]))
        for resume in (0.0, 1.0, 1e6):
            plans.stints.earn(1e9)
            stint = plans.stints.take(7, choice, usual, 4, resume)
            assert stint is None or 0 < stint.num_steps <= STINT_STEPS
            assert 0.0 <= plans.stints.credit_s <= STINT_CAP_STEPS * seconds
    assert plans.stints.take(7, choice, usual, 0, 0.0) is None, "plain decoding puts out one token in any text"
    dear = usual._replace(seconds=0.2 * seconds, goodput=5.0 * float(choice.goodput[7, length]))
    plans.stints.earn(1e9)
    assert plans.stints.take(7, choice, dear, 4, 0.0, least_steps=9) is None, "it pays for two steps"
    quick = usual._replace(seconds=1e-3 * seconds)
    plans.stints.earn(1e9)
    assert plans.stints.take(7, choice, quick, 4, 0.0) is None, "not one step of it could be saved up for"


def test_lengths_that_go_on_for_a_dozen_steps_after_copies_still_count_as_tried():
    plans = Estimator()
    plans.add_context(KEY, LIMITS)
    main = plans.context(KEY).main.plans
    assert main is not None
    copied = Plan(2, 3, 8)

    def told(plan: Plan) -> StepObservation:
        copying = Copies(copied, 4, 4, 8, ()) if plan.copy_min_match else None
        return StepObservation(4, plan.draft_length, 0.01, (4,) + (0,) * plan.draft_length, 9.0, copying=copying)

    many = [Plan(3)] * HARDER_STEPS
    played = [Plan(2), copied, *many, Plan(3), copied, Plan(3)]
    steps = [told(plan) for plan in played]
    expected = [Plan(), Plan(2), *[copied] * HARDER_STEPS, Plan(3), Plan(3), copied]
    assert plans_before(main, steps, spans_of(["w"] * len(steps))) == expected
    assert plans_before(main, steps[:1], spans_of(["w"])) == [copied], "the next group goes on"
    main.last.clear()
    assert [plans_before(main, [step], spans_of(["w"]))[0] for step in steps] == expected


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
    scores = [Play(CopyWorld(scenario, seed, 600, max_batch=8), seed).score() for seed in (100, 101)]
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


def test_rows_after_copies_count_as_steps_of_a_length_would_have_them():
    """40% of the text behind matches; a fifth of the rows after copies: in the long run tokens per text, not per step."""
    matched, alone = np.array([0.9, 0.81, 0.729]), np.array([0.5, 0.2, 0.1])
    text, share = 0.4, 0.2
    passed = 100.0 * (share * matched + (1.0 - share) * alone)
    rows = np.stack([np.append(100.0, passed[:-1]), passed])
    survival = np.array([0.6, 0.4, 0.3])
    for _ in range(30):
        counted = in_the_long_run_of_one(rows, survival, alone, share, text)
        survival = (counted[1] / counted[0]).cumprod()
    tokens = 1.0 / (text / (1.0 + matched.sum()) + (1.0 - text) / (1.0 + alone.sum()))
    assert 1.0 + survival.sum() == pytest.approx(tokens, rel=1e-6)
    assert (counted[0] >= counted[1]).all()
    assert counted[0, 0] < 100.0, "fewer rows than were seen stand for it"


@pytest.mark.parametrize("mix", ["mixed", "copying"])
def test_lengths_tried_after_copies_are_believed_to_be_nearly_as_good_as_they_are(mix):
    """Every tenth step at length 3 beside a plan; counted as they are, such steps say 0.92 and 0.945 of the truth."""
    plan, text = Plan(3, 3, 8), recorded_texts(mix)
    truth = text.rows(64, np.random.default_rng(9))
    tokens = np.mean([1.0 + truth.step(Plan(3), 64).accepted.mean() for _ in range(1000)])
    believed = []
    for seed in range(3):
        estimator, rows = Estimator(), text.rows(8, np.random.default_rng(seed))
        estimator.add_context(KEY, Limits(16, 8, 16))
        for _ in range(200):
            group = [*[plan] * 9, Plan(3)]
            estimator.observe(KEY, [report_of(each, rows.step(each, 8), 0.01, MACHINE) for each in group], "w")
        survival = estimator.survival(KEY, estimator.bucket_index(KEY, 8))
        believed.append(1.0 + sum(survival[:3]))
    assert 0.94 < np.mean(believed) / tokens < 1.02


def test_lengths_are_tried_after_copies_beside_a_worker_that_drafts_further():
    """Acceptance belongs to the pair, so another device's longer drafts make it longer than what plans know here."""
    estimator, rows = Estimator(), recorded_texts("mixed").rows(8, np.random.default_rng(0))
    other = ContextKey("t", "d", "cuda", "float32")
    estimator.add_context(KEY, LIMITS)
    estimator.add_context(other, Limits(8, 12, 16))
    for number in range(60):
        group = [*[Plan(3, 3, 8)] * 9, Plan(3)]
        found = estimator.observe(KEY, [report_of(each, rows.step(each, 8), 0.01, MACHINE) for each in group], "w")
        group = [Plan(12)] * 2
        estimator.observe(other, [report_of(each, rows.step(each, 8), 0.01, MACHINE) for each in group], "v")
        assert not any(event.factor == "reset" for event in found.drift_events), number


class Smooth:
    """Plain and copying steps of a machine whose every verified token costs the same, but for plain ones of 16 rows."""

    LIMITS = Limits(16, 3, 16)

    def __init__(self) -> None:
        self.estimator, self.rng = Estimator(), np.random.default_rng(3)
        self.estimator.add_context(KEY, self.LIMITS)

    def seconds(self, batch: int, length: int) -> float:
        return (0.008 + 0.0005 * batch * (1 + length) + 0.0008 * length) * (0.7 if (batch, length) == (16, 0) else 1.0)

    def plain(self, batch: int, length: int, factor: float = 1.0) -> StepObservation:
        seconds = factor * self.seconds(batch, length) * float(np.exp(0.04 * self.rng.standard_normal()))
        return StepObservation(batch, length, seconds, (0,) * length + (batch,), 100.0)

    def copying(self, batch: int, factor: float = 1.0) -> StepObservation:
        """Half of the rows copy four tokens, of which two are right, and half draft two."""
        half, plan = batch // 2, Plan(2, 3, 4)
        verified = batch + 4 * half + 2 * half
        seconds = factor * (0.008 + 0.0005 * verified + 0.0016) * float(np.exp(0.04 * self.rng.standard_normal()))
        told = Copies(plan, batch, half, verified, (CopiedRun(5, 4, 2, half),))
        return StepObservation(batch, 2, seconds, (half, 0, half), 100.0, False, False, copying=told)

    def observe(self, steps: list[StepObservation]) -> int:
        """How many changes were found."""
        groups = [steps[at : at + 8] for at in range(0, len(steps), 8)]
        return sum(len(self.estimator.observe(KEY, group, "w").drift_events) for group in groups)

    def believed(self, batch: int, length: int) -> float:
        rows = self.estimator.learned_rows(KEY, "w")
        cells = {(row.bucket.batch_max, row.estimate.speculation_length): row.estimate.step_s for row in rows}
        return cells[batch, length]


@pytest.fixture
def taught_machine() -> Smooth:
    """Plain steps of all lengths, then steps of fewer rows that copied."""
    played = Smooth()
    cells = [(batch, length) for batch in (1, 2, 4, 8, 16) for length in range(4)]
    played.observe([played.plain(*cells[number % len(cells)]) for number in range(600)])
    played.observe([played.copying((4, 8)[number // 8 % 2]) for number in range(400)])
    return played


def test_a_step_without_a_match_takes_what_a_plain_one_took(taught_machine):
    """Where plain steps do not lie on the smooth surface, plans that copy alone begin where those are."""
    context = taught_machine.estimator.context(KEY)
    times = context.group_of("w").plans.times
    at = np.array([context.buckets[-1].index])
    seconds = times.predict(at, np.zeros(1), np.zeros(1), np.array([16.0]))[0]
    assert seconds[0] == pytest.approx(taught_machine.seconds(16, 0), rel=0.1)


def test_plain_times_come_back_although_nobody_plays_plain_steps(taught_machine):
    """A slow while that was taken for a change, and from then on copying alone."""
    played = taught_machine
    changes = 0
    for number in range(100):
        batch, length = (4, 8)[number % 2], number // 2 % 4
        changes += played.observe([played.plain(batch, length, factor=1.8) for _ in range(8)])
        changes += played.observe([played.copying(batch, factor=1.8) for _ in range(8)])
    assert changes > 0
    assert played.believed(4, 0) > 1.4 * played.seconds(4, 0)
    played.observe([played.copying((4, 8)[number // 8 % 2]) for number in range(800)])
    for batch in (4, 8):
        assert played.believed(batch, 0) == pytest.approx(played.seconds(batch, 0), rel=0.2)
