"""Trials of learned arms against the baseline: blocks in reports, the interval of the gain, and the guard's verdicts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from speclen.controller.baseline.blocks import BLOCK_STEPS, Blocks, Plan
from speclen.controller.baseline.gain import gain_of, t_quantile
from speclen.controller.baseline.guard import DEFAULT, Guard, Range, bounds_of, range_of
from speclen.controller.baseline.tokens import Spread, compared_tokens, num_steps
from speclen.records import PLAIN, Arm, Choice, Hold, Limits, OutputEvaluation, StepFlag, StepRecord, Table, Trial

LEARNED, BASELINE = Arm(3), Arm(1)
TABLE, BASE = Table(7, (Choice(1, 32, LEARNED, 4.0),)), (Choice(1, 32, BASELINE),)
LIMITS = Limits(32, 4)


def plan_of(learned=LEARNED, baseline=BASELINE, uses_baseline=False):
    return Plan(9, range_of(4), learned, baseline, uses_baseline, 400)


def step(seq, arm=LEARNED, seconds=0.02, batch=4, probe_id=0, flags=(), runs=None):
    runs = runs or tuple(batch if j == 0 else 0 for j in range(arm.max_tokens + 1))
    return StepRecord(seq, batch, arm, seconds, runs, probe_id=probe_id, flags=frozenset(flags))


class Machine:
    """Steps of one worker: seconds by arm, times a factor that changes; a clock that is late by a share of a step."""

    def __init__(self, seconds, late=0.0, noise=0.0, level=lambda seq: 1.0, seed=0):
        self.seconds, self.late, self.noise, self.level = seconds, late, noise, level
        self.seq, self._carried, self.rng = 0, 0.0, np.random.default_rng(seed)

    def step(self, arm, batch=4, probe_id=0, flags=(), chance=0.7):
        self.seq += 1
        true_s = self.seconds[arm] * self.level(self.seq) * math.exp(self.noise * self.rng.standard_normal())
        said_s, self._carried = self._carried + (1.0 - self.late) * true_s, self.late * true_s
        runs = self.rng.geometric(1.0 - chance, batch) - 1
        histogram = np.bincount(np.minimum(runs, arm.max_tokens), minlength=arm.max_tokens + 1)
        return step(self.seq, arm, max(said_s, 1e-6), batch, probe_id, flags, tuple(histogram.tolist()))


def play(guard, machine, num_steps, batches=(4,), chance=0.7, shadow=False, lost=0.0):
    """Serve num_steps with the guard's table and trials; returns the verdicts and trials that came, with their step."""
    found, probe, left, waiting = [], None, 0, []
    table = guard.overrule(TABLE, BASE, shadow)
    for number in range(num_steps):
        batch = batches[number // 40 % len(batches)]
        if left and probe.batch_min <= batch <= probe.batch_max:
            arm, probe_id, left = probe.arm, probe.probe_id, left - 1
        else:
            arm, probe_id, left = table.arm_for(batch), 0, 0
        made = machine.step(arm, batch, probe_id, chance=chance)
        if machine.rng.random() >= lost:
            waiting.append(made)
        if len(waiting) >= 8:
            found += [(number, each) for each in guard.observe("w", waiting, 2, LIMITS)]
            waiting, table = [], guard.overrule(TABLE, BASE, shadow)
            offered = guard.next_trial("w", batch, TABLE, BASE, shadow)
            probe, left = (offered, offered.num_steps) if offered else (probe, left)
    return found


def trials_of(found):
    return [each for _, each in found if isinstance(each, Trial)]


def verdicts_of(found):
    return [(number, each) for number, each in found if not isinstance(each, Trial)]


# Blocks


@pytest.mark.parametrize("late", [0.0, 0.3, 1.0], ids=["own clock", "30% with the next step", "one step late"])
@pytest.mark.parametrize("drift", [0.0, 0.002], ids=["steady", "slowing down"])
def test_the_time_ratio_is_the_blocks_whatever_the_clock(late, drift):
    machine = Machine({LEARNED: 0.02, BASELINE: 0.015}, late, level=lambda seq: math.exp(drift * seq))
    found = trials_of(play(Guard(), machine, 1200))
    assert len(found) >= 4
    assert [each.log_time for each in found] == pytest.approx([math.log(0.02 / 0.015)] * len(found), abs=0.003)


def test_the_steps_after_a_change_of_arm_do_not_count():
    blocks, seq = Blocks(transition=4), 0
    results = []
    for arm, probe_id, num in ((LEARNED, 0, 40), (BASELINE, 9, BLOCK_STEPS + 4), (LEARNED, 0, 40)):
        if probe_id:
            blocks.begin(plan_of())
        for place in range(num):
            seq += 1
            slow = 5.0 if place < 4 and seq > 4 else 1.0
            results.append(blocks.add(step(seq, arm, 0.01 * slow * (2.0 if probe_id else 1.0), probe_id=probe_id)))
    (compared,) = filter(None, results)
    assert compared.log_time == pytest.approx(math.log(2.0))
    assert compared.seconds == pytest.approx((BLOCK_STEPS + 4) * 0.02)
    assert compared.extra_s == pytest.approx(4 * 4 * (0.02 + 0.01)), "what both changes of arm cost"


def test_steps_with_prefill_and_compilation_do_not_count():
    blocks, results = Blocks(transition=0), []
    for seq in range(1, 120):
        trial = 40 <= seq < 72
        if seq == 40:
            blocks.begin(plan_of())
        flags, seconds = (StepFlag.PREFILL,) if seq % 2 else (), 3.0 if seq % 2 else 0.02 if trial else 0.01
        results.append(blocks.add(step(seq, BASELINE if trial else LEARNED, seconds, probe_id=9 * trial, flags=flags)))
    (compared,) = filter(None, results)
    assert compared.log_time == pytest.approx(math.log(2.0))


def test_batch_sizes_that_differ_are_compared_by_a_curve():
    machine = Machine({LEARNED: 0.02, BASELINE: 0.015})
    machine.level = lambda seq: 1.0
    guard, sizes = Guard(), (8, 9, 10, 11, 12)
    plain_step = machine.step
    machine.step = lambda arm, batch, *rest, **more: plain_step(arm, batch, *rest, **more)._replace(
        latency_s=machine.seconds[arm] * batch**0.5
    )
    found = trials_of(play(guard, machine, 3000, batches=sizes))
    assert np.mean([each.log_time for each in found]) == pytest.approx(math.log(0.02 / 0.015), abs=0.02)


@pytest.mark.parametrize("gap", [1, 1000, -5], ids=["one lost", "long silence", "another incarnation"])
def test_a_trial_survives_lost_reports_but_not_a_long_silence(gap):
    blocks, results = Blocks(transition=0), []
    seqs = [*range(1, 41), *range(41, 57), *range(57, 80)]
    seqs = [seq if place < 60 else max(1, seq + gap) for place, seq in enumerate(seqs)]
    for place, seq in enumerate(seqs):
        if place == 40:
            blocks.begin(plan_of())
        results.append(blocks.add(step(seq, LEARNED, probe_id=9 * (40 <= place < 56))))
    assert bool([each for each in results if each and each.log_time is not None]) == (gap == 1)
    assert blocks.plan is None


# Accepted tokens


RUNS = Counter({0: 30, 1: 20, 2: 10, 3: 40})  # 260 tokens of 100 sequences; 120 more steps if alone
NGRAMS = Arm(0, ngram=True)
OUTPUTS = [{PLAIN: 40, Arm(1): 25, Arm(3): 16, NGRAMS: 30}, {PLAIN: 30, NGRAMS: 20}]


@pytest.mark.parametrize(
    ("learned", "baseline", "uses_baseline", "outputs", "expected"),
    [
        (Arm(3), Arm(1), False, [], (260.0, 100.0, 260.0, 150.0)),
        (Arm(3), PLAIN, False, OUTPUTS, (260.0, 100.0, 260.0, 260.0)),
        (Arm(1), Arm(3), True, [], (260.0, 150.0, 260.0, 100.0)),
        (Arm(3), NGRAMS, False, OUTPUTS, (40.0, 16.0, 40.0, 30.0)),
        (PLAIN, NGRAMS, False, OUTPUTS, (70.0, 70.0, 70.0, 50.0)),
        (Arm(3), NGRAMS, False, [], None),
    ],
    ids=["shorter tried", "plain tried", "baseline is longer and used", "n-grams", "n-grams beside plain", "unknown"],
)
def test_both_arms_are_compared_on_the_same_text(learned, baseline, uses_baseline, outputs, expected):
    plan = plan_of(learned, baseline, uses_baseline)
    assert compared_tokens(plan, RUNS, Counter({0: 1}), outputs, Spread()) == expected


def drawn_outputs(rng, spread, number=400):
    """True for each token that is drafted correctly, by output: chances differ among outputs."""
    return [rng.random(80) < min(max(0.7 + spread * rng.standard_normal(), 0.05), 0.95) for _ in range(number)]


def runs_through(right, length, at=0):
    """Accepted runs of drafts of a length through an output, from a token on."""
    while at < len(right):
        wrong = np.flatnonzero(~right[at : at + length])
        yield int(wrong[0]) if len(wrong) else min(length, len(right) - at - 1)
        at += 1 + (int(wrong[0]) if len(wrong) else length)


@pytest.mark.parametrize(("longest", "length"), [(8, 3), (8, 5), (5, 2), (3, 2), (3, 1), (4, 0)])
@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_long_drafts_tell_the_steps_of_shorter_ones(longest, length, spread):
    outputs = drawn_outputs(np.random.default_rng(11), spread)
    runs = Counter(run for right in outputs for run in runs_through(right, longest))
    true = sum(len(list(runs_through(right, length))) for right in outputs)
    assert num_steps(runs, longest, length) == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize(
    ("in_use", "tried", "within"), [(0, 1, 0.02), (0, 3, 0.03), (1, 3, 0.03), (3, 5, 0.03), (3, 8, 0.05)]
)
@pytest.mark.parametrize("spread", [0.0, 0.15])
def test_trials_of_longer_drafts_do_not_overestimate_them(in_use, tried, within, spread):
    rng, found, alike = np.random.default_rng(12), [], Spread()
    outputs = drawn_outputs(rng, spread)
    starts = [(right, at) for right in outputs for at in np.cumsum([0, *(r + 1 for r in runs_through(right, in_use))])]
    plan = plan_of(Arm(in_use), Arm(tried))
    for _ in range(400):
        rows = []
        while len(rows) < 4:
            right, at = starts[rng.integers(len(starts))]
            runs = list(runs_through(right, tried, at))[:8]
            rows += [runs] if len(runs) == 8 else []
        steps = [
            step(1, Arm(tried), runs=tuple(np.bincount(each, minlength=tried + 1).tolist()))
            for each in zip(*rows, strict=True)
        ]
        alike.add(steps)
        total = Counter(run for runs in rows for run in runs)
        found.append(compared_tokens(plan, Counter(), total, [], alike))
    _, mine, _, its = np.sum(found, axis=0)
    true = [sum(len(list(runs_through(right, length))) for right in outputs) for length in (in_use, tried)]
    assert math.log(mine / its) == pytest.approx(math.log(true[0] / true[1]), abs=within)


def test_the_guard_reads_evaluations_by_the_arms_of_the_worker():
    guard, limits = Guard(), Limits(32, 1, ngram=True)
    whole, part = (OutputEvaluation(0, 41, 40, steps, steps, steps) for steps in ((40, 25, 20, 18), (40, 20)))
    guard.observe("w", [step(1)._replace(evaluations=(whole, part))], 2, limits)
    whole, part = guard.ranges[range_of(4)].outputs
    assert whole == {PLAIN: 40, Arm(1): 25, Arm(0, ngram=True): 20, Arm(1, ngram=True): 18}
    assert part == {PLAIN: 40, Arm(0, ngram=True): 20}


# Gain


def made_trial(rng, log_gain, spread=0.05, alike=0.0):
    """alike: log of a factor on the tokens of both sides."""
    learned, baseline = (math.exp(alike + spread * rng.standard_normal()) for _ in range(2))
    sums = 2.0 * learned * 96, 96, 2.0 * math.exp(-0.3) * baseline * 48, 48
    return Trial(4, LEARNED, BASELINE, 0.3 - log_gain + spread * rng.standard_normal(), *sums)


@pytest.mark.parametrize(
    ("alike", "number", "least"),
    [(0.0, 8, 0.93), (0.0, 20, 0.93), (0.0, 60, 0.93), (0.3, 8, 0.91), (0.3, 20, 0.91), (0.3, 60, 0.91)]
    + [(0.6, 8, 0.85), (0.6, 20, 0.90), (0.6, 60, 0.91)],  # eight trials that are as alike tell too little
)
def test_the_interval_covers(alike, number, least):
    # 400 intervals, so a standard error of 0.011: neighbouring trials correlate by `alike`.
    rng, hits = np.random.default_rng(5), 0
    for _ in range(400):
        drift, trials = rng.standard_normal(), []
        for _ in range(number):
            trials.append(made_trial(rng, 0.05 + 0.05 * drift, spread=0.0))
            drift = alike * drift + math.sqrt(1 - alike**2) * rng.standard_normal()
        low, high = gain_of(trials, [1.0] * number).interval()
        hits += low <= math.exp(0.05) <= high
    assert hits >= 400 * least


def test_a_jump_in_the_middle_of_a_trial_moves_the_gain_little():
    rng = np.random.default_rng(7)
    trials = [made_trial(rng, 0.05) for _ in range(20)]
    spoiled = [*trials, trials[0]._replace(log_time=trials[0].log_time + 2.0)]
    assert gain_of(spoiled, [1.0] * 21).log_ratio == pytest.approx(gain_of(trials, [1.0] * 20).log_ratio, abs=0.02)


def test_one_trial_has_no_interval():
    assert gain_of([made_trial(np.random.default_rng(1), 0.1)], [1.0]).interval() == (0.0, math.inf)


def test_student_quantiles():
    assert [t_quantile(0.975, freedom) for freedom in (5, 10, 30, 1e6)] == pytest.approx(
        [2.571, 2.228, 2.042, 1.960], rel=0.01
    )


# Guard


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_a_slower_learned_arm_gives_way_to_the_baseline_and_returns(late):
    machine = Machine({LEARNED: 0.030, BASELINE: 0.015}, late, noise=0.05)  # 2.5 tokens against 1.7
    guard = Guard()
    (number, verdict), *others = verdicts_of(play(guard, machine, 4000))
    assert number < 3000
    assert verdict.uses_baseline
    assert "the baseline is used" in verdict.reason
    assert not others
    assert guard.overrule(TABLE, BASE).arm_for(4) == BASELINE
    assert guard.overrule(TABLE, BASE).arm_for(16) == LEARNED  # another range
    machine.seconds[LEARNED] = 0.016
    (_, verdict), *_ = verdicts_of(play(guard, machine, 30_000))
    assert not verdict.uses_baseline
    assert guard.overrule(TABLE, BASE).arm_for(4) == LEARNED


def test_a_better_learned_arm_stays_and_trials_become_rare():
    machine = Machine({LEARNED: 0.016, BASELINE: 0.015}, noise=0.05)
    guard = Guard()
    first, later = play(guard, machine, 3000), play(guard, machine, 20_000)
    assert not verdicts_of(first + later)
    assert len(trials_of(first)) * BLOCK_STEPS <= 0.1 * 3000
    assert len(trials_of(later)) * BLOCK_STEPS <= 0.022 * 20_000
    spent_s = 23_000 * 0.016
    assert sum(trial.lost_s for trial in trials_of(first + later)) <= 0.005 * spent_s


def test_a_dear_baseline_is_tried_rarely():
    machine = Machine({LEARNED: 0.016, BASELINE: 0.16}, noise=0.02)
    found = trials_of(play(Guard(), machine, 30_000))
    lost_s = len(found) * BLOCK_STEPS * (0.16 - 0.016 * 1.7 / 2.5)
    assert len(found) >= 2
    assert lost_s <= 0.012 * 30_000 * 0.016 + 2.6  # one more than the budget allows


def test_equal_arms_do_not_fall_back():
    # 27,000 trials are 200 hours at 30 steps a second and 2% of the steps.
    rng, place, falls = np.random.default_rng(8), Range(), 0
    for _ in range(3000):
        noise = 0.02 if rng.random() < 0.7 else 0.2
        place.add(made_trial(rng, 0.0, noise), DEFAULT)
        falls += bool(place.judge(DEFAULT))
    assert falls == 0


def test_reports_that_are_lost_do_not_stop_trials():
    machine = Machine({LEARNED: 0.030, BASELINE: 0.015}, noise=0.05)
    assert verdicts_of(play(Guard(), machine, 6000, lost=0.2))


def test_shadow_serves_the_baseline_and_tries_the_learned_arm():
    machine = Machine({LEARNED: 0.016, BASELINE: 0.015}, noise=0.02)
    guard = Guard()
    found = trials_of(play(guard, machine, 6000, shadow=True))
    assert guard.overrule(TABLE, BASE, shadow=True).arm_for(4) == BASELINE
    assert all(trial.is_baseline_used for trial in found)
    assert 0.03 <= len(found) * BLOCK_STEPS / 6000 <= 0.055
    assert guard.ranges[range_of(4)].gain.ratio == pytest.approx(2.53 / 1.7 * 15 / 16, rel=0.05)


def test_nothing_is_compared_without_a_baseline_or_with_equal_arms():
    machine = Machine({LEARNED: 0.02, BASELINE: 0.02})
    guard = Guard()
    play(guard, machine, 400)
    assert guard.next_trial("w", 4, TABLE, ()) is None
    assert guard.next_trial("w", 4, TABLE, TABLE.choices) is None
    assert guard.next_trial("unknown", 4, TABLE, BASE) is None
    assert guard.overrule(TABLE, ()) is TABLE


def serve_requests(guard, machine, num_requests, num_steps, pause):
    """Requests of some steps one at a time; trials that did not begin before a request ended expire in the pause."""
    found, table = [], guard.overrule(TABLE, BASE)
    for _ in range(num_requests):
        probe, left, steps = None, 0, []
        for number in range(num_steps):
            arm = probe.arm if left else table.arm_for(1)
            flags = (StepFlag.PREFILL,) if number == 0 else ()
            steps.append(machine.step(arm, 1, probe.probe_id if left else 0, flags))
            left = max(left - 1, 0)
            if len(steps) == 8:
                found += guard.observe("w", steps, 2, LIMITS)
                steps, table = [], guard.overrule(TABLE, BASE)
                offered = guard.next_trial("w", 1, TABLE, BASE)
                probe, left = (offered, offered.num_steps) if offered else (probe, left)
        found += guard.observe("w", steps, 2, LIMITS)
        machine.seq += pause
    return found


@pytest.mark.parametrize(
    ("num_steps", "pause", "learns"),
    [(40, 0, True), (20, 0, True), (40, 100, True), (4, 0, False)],
    ids=["one request a minute", "short requests", "requests whose neighbours were not reported", "four steps each"],
)
def test_rare_requests_bring_a_verdict_or_do_no_harm(num_steps, pause, learns):
    machine, guard = Machine({LEARNED: 0.030, BASELINE: 0.015}, noise=0.02), Guard()
    found = serve_requests(guard, machine, 4000 // num_steps, num_steps, pause)
    assert any(not isinstance(each, Trial) for each in found) == learns
    assert guard.overrule(TABLE, BASE).arm_for(1) == (BASELINE if learns else LEARNED)


def test_a_trial_that_never_ran_is_offered_again():
    machine, guard, offered = Machine({LEARNED: 0.02, BASELINE: 0.02}), Guard(), 0
    for _ in range(200):
        guard.observe("w", [machine.step(LEARNED) for _ in range(8)], 2, LIMITS)
        offered += guard.next_trial("w", 4, TABLE, BASE) is not None
    assert offered > 5
    assert guard.ranges[range_of(4)].lost_s == 0.0


@pytest.mark.parametrize("beyond", [Arm(9), Arm(0, ngram=True)])
def test_a_baseline_that_a_worker_cannot_run_changes_nothing(beyond):
    machine, guard, base = Machine({LEARNED: 0.02}), Guard(), (Choice(1, 32, beyond),)
    for _ in range(200):
        assert guard.observe("w", [machine.step(LEARNED) for _ in range(8)], 2, LIMITS) == []
        guard.next_trial("w", 4, TABLE, base)  # the worker ignores it
    assert guard.overrule(TABLE, base).arm_for(4) == LEARNED


def test_a_worker_that_leaves_in_a_trial_does_not_hold_up_others():
    machine, guard = Machine({LEARNED: 0.02, BASELINE: 0.02}), Guard()
    for _ in range(50):
        guard.observe("gone", [machine.step(LEARNED) for _ in range(8)], 2, LIMITS)
        if guard.next_trial("gone", 4, TABLE, BASE):
            break
    other = Machine({LEARNED: 0.02, BASELINE: 0.02})
    assert trials_of(play(guard, other, 1500))


def test_holds_come_before_everything_and_add_up():
    guard = Guard()
    guard.hold([Hold(8, 16, Arm(2)), Hold(16, 32, None)], release=False)
    table = guard.overrule(TABLE, BASE)
    assert [table.arm_for(size) for size in (7, 8, 15, 16, 32)] == [LEARNED, Arm(2), Arm(2), BASELINE, BASELINE]
    assert table.version > TABLE.version
    guard.hold([], release=True)
    assert guard.overrule(TABLE, BASE).arm_for(8) == LEARNED
    assert "smaller size first" in Hold(8, 2, None).reason_against(Limits())
    assert "largest arm" in Hold(1, 2, Arm(9)).reason_against(Limits(32, 8))


def test_stored_trials_bring_the_verdict_back():
    machine, guard, again = Machine({LEARNED: 0.030, BASELINE: 0.015}, noise=0.05), Guard(), Guard()
    for trial in trials_of(play(guard, machine, 4000)):
        again.take(range_of(trial.batch_size), trial)
    assert again.overrule(TABLE, BASE).choices == guard.overrule(TABLE, BASE).choices


def test_ranges_double():
    assert [range_of(size) for size in (1, 2, 3, 4, 5, 8, 9, 4096)] == [0, 1, 2, 2, 3, 3, 4, 12]
    assert [bounds_of(number) for number in (0, 1, 2, 3, 12)] == [(1, 1), (2, 2), (3, 4), (5, 8), (2049, 4096)]
