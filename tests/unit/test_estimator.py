"""The estimator's promises, towards simulated workers: the public calls of `Estimator` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from speclen.controller.analysis.replay import ContextAdded, Event, GroupObserved, ProfileImported, replay
from speclen.controller.estimator import Estimator, Outcome
from speclen.records import (
    Arm,
    ContextKey,
    Decision,
    DriftEvent,
    Limits,
    OutputEvaluation,
    Probe,
    Profile,
    ProfileCell,
    StepFlag,
    StepRecord,
)
from tests.support.world import World

KEY = ContextKey("target", "draft", "cpu:test", "float32")
LIMITS = Limits(32, 8)
GROUP = 8
SIZES = (1, 2, 4, 8, 16, 32)


class Worker:
    """A simulated worker that follows its table and its probes. distort: what it makes of its reports."""

    def __init__(self, estimator: Estimator, name: str = "worker", seed: int = 0, acceptance: float = 0.75) -> None:
        self.estimator, self.name, self.world = estimator, name, World(acceptance)
        self.rng, self.seq = np.random.default_rng(seed), 0
        self.distort: Callable[[StepRecord], StepRecord] = lambda step: step
        self.slowdown, self.total_s, self.lost_s = 1.0, 0.0, 0.0
        self.probe: Probe | None = None

    def chosen(self, batch_size: int) -> int:
        return self.estimator.table(KEY, self.name).arm_for(batch_size).speculation_length

    def shortfall(self, batch_size: int) -> float:
        """Share of the oracle's goodput that the table loses."""
        return self.world.shortfall(batch_size, self.chosen(batch_size))

    def step(self, batch_size: int, length: int, probe_id: int = 0) -> StepRecord:
        """One step with noise."""
        self.seq += 1
        latency_s, histogram = self.world.draw(batch_size, length, self.rng)
        drafted = batch_size if length else 0
        counts = (frozenset(), probe_id, (), drafted, batch_size * (length + 1))
        latency_s *= self.slowdown
        return self.distort(StepRecord(self.seq, batch_size, Arm(length), latency_s, histogram, 100.0, 0, *counts))

    def serve(self, batch_size: int, num_steps: int) -> list[object]:
        """Decode and report in groups; returns decisions and probes."""
        happened: list[object] = []
        for _ in range(num_steps // GROUP):
            chosen = self.chosen(batch_size)
            probe, self.probe = self.probe, None
            lengths = [chosen] * GROUP
            if probe is not None and probe.batch_min <= batch_size <= probe.batch_max:
                lengths[: probe.num_steps] = [probe.arm.speculation_length] * probe.num_steps
            ids = [probe.probe_id if probe and length != chosen else 0 for length in lengths]
            steps = [self.step(batch_size, *each) for each in zip(lengths, ids, strict=True)]
            for each in steps:
                self.lost_s += self.world.lost_s(batch_size, each.arm.speculation_length, chosen)
                self.total_s += each.latency_s
            happened += self.estimator.observe(KEY, steps, self.name).decisions
            self.probe = self.estimator.take_probe(KEY, self.name, batch_size)
            happened.append(self.probe)
        return happened


def made(policy: str = "adaptive", limits: Limits = LIMITS) -> Estimator:
    """An estimator with one context."""
    estimator = Estimator(policy)
    estimator.add_context(KEY, limits)
    return estimator


def profile(
    draft_s: float = 0.0015, acceptance: float = 0.75, sizes: Sequence[int] = SIZES, longest: int = 8
) -> Profile:
    """An offline profile, right by default."""
    world, lengths = World(acceptance, draft_s), range(longest + 1)
    cells = tuple(ProfileCell(size, at, world.step_s(size, at), num_steps=20) for size in sizes for at in lengths)
    return Profile(cells, tuple(world.survival()[:longest]), (4000,) * longest, source="test")


def test_the_same_calls_give_the_same_decisions_also_with_save_and_restore_in_between() -> None:
    first = Worker(made())
    second = Worker(made())
    for number in range(24):
        assert first.serve(SIZES[number % 6], 16) == second.serve(SIZES[number % 6], 16)
        if number % 5 == 0:
            blob, second.estimator = second.estimator.save(KEY.pair), made()
            second.estimator.restore(KEY.pair, blob)
            assert second.estimator.save(KEY.pair) == blob
    assert first.estimator.rows(KEY) == second.estimator.rows(KEY)
    assert first.estimator.table(KEY) == second.estimator.table(KEY)


class Noted(Estimator):
    """Notes its events, and its decisions with the last group before each."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.made: list[tuple[int, Decision]] = []
        self.num_groups = 0

    def note(self, event: Event, decisions: list[Decision]) -> None:
        self.events.append(event)
        self.made += [(self.num_groups, each) for each in decisions]

    def observe(self, key: ContextKey, records: Sequence[StepRecord], worker_id: str = "") -> Outcome:
        self.num_groups += 1
        outcome = super().observe(key, records, worker_id)
        self.note(GroupObserved(self.num_groups, key, worker_id, records), outcome.decisions)
        return outcome


def test_a_replay_of_its_events_makes_the_same_decisions() -> None:
    """To the last bit, and without the probes. The profile is wrong, and the context is widened half-way."""
    estimator = Noted()
    for limits in (Limits(8, 4), LIMITS):
        estimator.note(ContextAdded(KEY, limits), estimator.add_context(KEY, limits))
        if not estimator.num_groups:
            imported = ProfileImported(KEY, profile(draft_s=0.015, sizes=(1, 4, 8), longest=4))
            estimator.note(imported, estimator.seed_profile(*imported))
        worker = Worker(estimator)
        for number in range(20):
            worker.serve((1, 4, 8)[number % 3], 16)
    assert replay(estimator.events).decisions == estimator.made
    assert len(estimator.made) > 2


@pytest.mark.parametrize("acceptance", [0.3, 0.75])
def test_from_nothing_it_finds_arms_close_to_the_best(acceptance: float) -> None:
    worker = Worker(made(), acceptance=acceptance)
    for number in range(60):
        worker.serve(SIZES[number % 6], 40)
    assert max(map(worker.shortfall, SIZES)) < 0.03


def test_a_very_wrong_profile_is_overcome_while_the_load_moves() -> None:
    """By the profile drafting never pays. The batch size moves before a probe can run at the one it was made for."""
    worker = Worker(made())
    worker.estimator.seed_profile(KEY, profile(draft_s=0.06))
    assert worker.shortfall(4) > 0.3, "the profile must be wrong"
    for number in range(60):
        worker.serve((3, 4, 5, 4)[number % 4], GROUP)
    assert worker.shortfall(4) < 0.03
    worker.estimator.seed_profile(KEY, profile(draft_s=0.06))
    assert worker.shortfall(4) < 0.03, "it seeds and never overrides"


def test_plain_steps_that_are_faster_than_any_formula_expects_are_found() -> None:
    """As on a CPU that prepares every operation anew where n-grams change the number of tokens."""
    estimator, rng = made(limits=Limits(16, 3, ngram=True)), np.random.default_rng(0)
    num_steps, num_drafted = (100, 80, 76, 75, 60, 54, 52, 51), (0, 80, 76, 75, 0, 40, 38, 37)
    evaluation = OutputEvaluation(0, 100, 100, num_steps, num_drafted, (100, 160, 228, 300, 180, 200, 230, 260))
    arms, probe = Limits(16, 3, ngram=True).arms(), None
    for seq in range(900):
        batch_size, probe_id, arm = (
            (8, 0, arms[seq % 8]) if seq < 400 else (16, 0, estimator.table(KEY, "w").arm_for(16))
        )
        if batch_size == 16 and seq % 10 < 3 and probe is not None:
            probe_id, arm = probe.probe_id, probe.arm
        tokens, passes = batch_size * (3 if arm.ngram else 1 + arm.speculation_length), arm.speculation_length
        step_s = (0.0125 + 0.0001 * tokens + 0.002 * passes) * (0.4 if batch_size == 16 and arm == Arm(0) else 1.0)
        step_s *= float(np.exp(0.05 * rng.standard_normal()))
        step = StepRecord(seq, batch_size, arm, step_s, (batch_size, *(0,) * arm.max_tokens), 100.0, probe_id=probe_id)
        step = step._replace(num_verified_tokens=tokens, num_drafted_sequences=batch_size if passes else 0)
        estimator.observe(KEY, [step._replace(evaluations=(evaluation,))], "w")
        if seq % 10 == 9:
            probe = estimator.take_probe(KEY, "w", batch_size)
    assert estimator.table(KEY, "w").arm_for(16) == Arm(0)
    assert estimator.table(KEY, "w").arm_for(8).ngram


def test_arms_that_are_level_do_not_take_turns() -> None:
    """Draft passes that cost what their tokens win: every length has nearly the same goodput."""
    worker = Worker(made(), acceptance=0.6)
    worker.serve(8, 800)
    chosen = set()
    changes = 0
    for _ in range(50):
        changes += sum(
            isinstance(each, Decision) and each.batch_min <= 8 <= each.batch_max for each in worker.serve(8, 40)
        )
        chosen.add(worker.estimator.table(KEY).arm_for(8))
    assert changes <= 4, f"{changes} changes among {chosen} in 2,000 steps"


def test_a_widened_context_keeps_what_it_uses() -> None:
    worker = Worker(made(limits=Limits(8, 8)))
    for number in range(20):
        worker.serve((1, 2, 4, 8)[number % 4], 40)
    worker.estimator.add_context(KEY, Limits(16, 8))
    assert max(map(worker.shortfall, (1, 2, 4, 8))) < 0.03
    assert worker.estimator.table(KEY).choices[-1].batch_max == 16
    worker.serve(8, 40)
    assert max(map(worker.shortfall, (1, 2, 4, 8))) < 0.03


def test_a_slowdown_of_all_arms_alike_does_not_move_the_choice() -> None:
    """Stretches of 40 steps that take 1.7 times as long."""
    worker = Worker(made(), seed=1)
    worker.estimator.seed_profile(KEY, profile())
    worker.serve(4, 400)
    shortfalls = []
    for number in range(30):
        worker.slowdown = 1.7 if number % 3 == 2 else 1.0
        worker.serve(4, 40)
        shortfalls.append(worker.shortfall(4))
    assert max(shortfalls) < 0.03


def wrong_times(step: StepRecord) -> StepRecord:
    return step._replace(latency_s=step.latency_s * 4.0 / (1 + step.arm.speculation_length) ** 1.5)


def all_accepted(step: StepRecord) -> StepRecord:
    return step._replace(accepted_histogram=(0,) * step.arm.speculation_length + (step.batch_size,))


@pytest.mark.parametrize("fault", [wrong_times, all_accepted])
def test_a_faulty_worker_of_four_is_isolated_and_the_others_keep_their_choice(fault) -> None:
    estimator = made()
    workers = [Worker(estimator, f"worker-{at}", at, 0.6) for at in range(4)]

    workers[0].distort = fault
    for number in range(100):
        for at, worker in enumerate(workers):
            worker.serve((2, 4, 8, 12)[(number // 5 + at) % 4], GROUP)
    assert [estimator.is_isolated(KEY, worker.name) for worker in workers] == [True, False, False, False]
    assert estimator.num_isolated(KEY) == 1
    assert max(workers[1].shortfall(size) for size in (2, 4, 8, 12)) < 0.03


@pytest.mark.parametrize(("acceptance", "draft_s"), [(0.3, 0.0015), (0.75, 0.0015), (0.02, 0.05)])
def test_exploration_spends_about_a_percent_of_the_time_after_the_first_minute(
    acceptance: float, draft_s: float
) -> None:
    """The last is a draft of which every probe costs several steps, so that the budget is what limits them."""
    worker = Worker(made())
    worker.world = World(acceptance, draft_s)
    number, before = 0, (0.0, 0.0)
    while worker.total_s < 150.0:
        worker.serve((1, 4, 12, 30)[number % 4], 40)
        number += 1
        if not before[0] and worker.total_s > 60.0:
            before = worker.total_s, worker.lost_s
    assert worker.lost_s - before[1] < 0.015 * (worker.total_s - before[0])


def test_steps_that_a_probe_makes_longer_are_paid_for() -> None:
    """Catching the draft model up takes as long as ten steps: then there are fewer probes."""

    def with_catch_up(step: StepRecord) -> StepRecord:
        if not step.probe_id:
            return step
        return step._replace(latency_s=10 * step.latency_s, flags=frozenset({StepFlag.CATCH_UP}))

    counts = []
    for distort in (lambda step: step, with_catch_up):
        worker = Worker(made(), acceptance=0.1)
        worker.distort = distort
        counts.append(sum(isinstance(each, Probe) for each in worker.serve(8, 4000)))
    assert 0 < counts[1] < counts[0] / 2


def test_sizes_never_seen_get_no_longer_arm_than_the_nearest_seen() -> None:
    worker = Worker(made(limits=Limits(128, 8)))
    for number in range(20):
        worker.serve((4, 16)[number % 2], 40)
    table = worker.estimator.table(KEY)
    for size in range(1, 129):
        nearest = min((4, 16), key=lambda seen: abs(np.log(size / seen)))
        if size not in (4, 16) and size != 8:  # as near to both
            assert table.arm_for(size).speculation_length <= table.arm_for(nearest).speculation_length


def test_a_worker_with_smaller_limits_gets_no_probe_beyond_them() -> None:
    worker, found = Worker(made(limits=Limits(32, 8, True))), []
    for _ in range(100):
        worker.estimator.observe(KEY, [worker.step(4, 2) for _ in range(GROUP)], worker.name)
        found.append(worker.estimator.take_probe(KEY, worker.name, 4, Limits(32, 3)))
    probes = [probe for probe in found if probe is not None]
    assert probes
    assert all(probe.arm.within(Limits(32, 3)) == probe.arm for probe in probes)
    assert len({probe.probe_id for probe in probes}) == len(probes)


def test_flagged_steps_are_no_samples_of_time() -> None:
    worker = Worker(made())
    worker.distort = lambda step: step._replace(flags=frozenset({StepFlag.PREFILL}))
    worker.serve(4, 40)
    assert not any(row.num_steps for row in worker.estimator.rows(KEY))


def test_the_table_expects_the_times_of_each_range() -> None:
    worker = Worker(made())
    worker.serve(4, 40)
    expected = [row.ms_per_token for row in worker.estimator.rows(KEY) if row.is_best]
    assert [choice.ms_per_token for choice in worker.estimator.table(KEY).choices] == pytest.approx(expected)


@pytest.mark.parametrize(("policy", "length"), [("none", 0), ("fixed:3", 3), ("profile", 8)])
def test_policies_that_do_not_learn_keep_their_table(policy: str, length: int) -> None:
    worker = Worker(made(policy))
    worker.estimator.seed_profile(KEY, profile(draft_s=1e-5, acceptance=0.99))
    assert worker.serve(1, 160) == [None] * 20
    assert worker.estimator.table(KEY).arm_for(1) == Arm(length)


def test_a_policy_that_does_not_learn_is_that_of_isolated_workers_too() -> None:
    estimator = made("fixed:3")
    workers = [Worker(estimator, f"worker-{at}", at, 0.6) for at in range(4)]
    workers[0].distort = all_accepted
    for _ in range(60):
        for worker in workers:
            worker.serve(4, GROUP)
    assert estimator.is_isolated(KEY, "worker-0")
    assert {choice.arm for choice in estimator.table(KEY, "worker-0").choices} == {Arm(3)}


def test_a_policy_that_does_not_learn_goes_on_with_longer_lengths() -> None:
    worker = Worker(made("fixed:5", limits=Limits(8, 2)))
    worker.serve(4, 40)
    decisions = worker.estimator.add_context(KEY, Limits(8, 7))
    assert [each.arm for each in decisions] == [Arm(5)] * 8
    assert all(each.previous_ms_per_token and each.ms_per_token for each in decisions)


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="best"):
        Estimator("best")
    with pytest.raises(ValueError, match="state"):
        made().restore(KEY.pair, b"nothing of ours")


def test_contexts_of_one_pair_may_have_other_limits():
    """A context with shorter lengths than another of its pair once raised from the shapes of what they shared."""
    estimator = Estimator()
    short, long = (ContextKey("target", "draft", device, "float32") for device in ("small", "large"))
    estimator.add_context(short, Limits(8, 2))
    estimator.add_context(long, Limits(16, 6, ngram=True))
    estimator.seed_profile(short, Profile((ProfileCell(1, 0, 0.01), ProfileCell(4, 2, 0.02)), (0.7, 0.5), (50, 50)))
    for key, length in ((short, 2), (long, 6)):
        steps = [StepRecord(seq, 4, Arm(length), 0.02, (2, *[0] * (length - 1), 2)) for seq in range(1, 40)]
        estimator.observe(key, steps, "worker")
        assert max(row.arm.speculation_length for row in estimator.rows(key)) == length
        assert estimator.table(key).choices


def test_devices_learn_apart_from_a_first_guess_of_acceptance() -> None:
    """Verifying a token takes twenty times as long on the large device, and its text is harder."""
    rng, estimator = np.random.default_rng(2), Estimator()
    small, large = (KEY._replace(device=device) for device in ("small", "large"))

    def learn(key: ContextKey, num_steps: int, accepted: float, fixed_s: float, token_s: float) -> tuple[int, float]:
        """The learned length, and the expected tokens of one draft token."""
        estimator.add_context(key, LIMITS)
        for seq in range(1, num_steps + 1):
            length = seq % 5
            runs = np.minimum(rng.geometric(1.0 - accepted, size=8) - 1, length)
            latency_s = fixed_s + 0.001 * length + 8 * token_s * (length + 1)
            latency_s *= float(np.exp(0.03 * rng.standard_normal()))
            histogram = tuple(np.bincount(runs, minlength=length + 1).tolist())
            step = StepRecord(seq, 8, Arm(length), latency_s, histogram, 100.0)
            estimator.observe(key, [step._replace(num_drafted_sequences=8, num_verified_tokens=8 * (length + 1))], "w")
        [tokens] = [row.expected_tokens for row in estimator.rows(key) if row.batch_min == 8 and row.arm == Arm(1)]
        return estimator.table(key).arm_for(8).speculation_length, tokens

    length, tokens = learn(small, 400, 0.9, 0.020, 0.0002)
    assert length >= 3
    assert tokens == pytest.approx(1.9, abs=0.05)
    assert learn(large, 1, 0.3, 0.008, 0.0040)[1] > 1.75, "the prior alone says 1.7"
    assert learn(large, 400, 0.3, 0.008, 0.0040) == (0, pytest.approx(1.3, abs=0.05))
    assert learn(small, 1, 0.9, 0.020, 0.0002)[1] == pytest.approx(1.9, abs=0.05)


def test_a_context_that_starts_anew_forgets_what_it_learned_and_goes_on() -> None:
    worker = Worker(made())
    worker.serve(4, 400)
    version = worker.estimator.table(KEY).version
    outcome = worker.estimator.start_anew(KEY, "a test")
    assert [(event.factor, event.context) for event in outcome.drift_events] == [("reset", KEY)]
    assert not any(row.num_steps for row in worker.estimator.rows(KEY))
    worker.serve(4, 400)
    assert worker.estimator.table(KEY).version > version
    assert worker.shortfall(4) < 0.03


def test_outputs_that_change_are_an_event_and_hard_requests_in_a_row_are_not():
    worker = Worker(made())
    events: list[DriftEvent] = []

    def serve(num_steps: int, num_plain_steps: int) -> None:
        """Decode with some outputs evaluated. num_plain_steps: with drafts, there are half as many."""
        drafting = (num_plain_steps // 2,) * 8
        evaluation = OutputEvaluation(0, 60, 60, (num_plain_steps, *drafting), (0, *drafting), (60,) * 9)
        for _ in range(num_steps):
            step = worker.step(4, 3)._replace(evaluations=(evaluation,))
            events.extend(worker.estimator.observe(KEY, [step], worker.name).drift_events)

    for acceptance in (0.9, 0.3) * 4:
        worker.world = World(acceptance)
        serve(60, 60)
    assert not events
    serve(60, 20)
    assert {event.factor for event in events} == {"acceptance"}


def test_outputs_evaluated_for_n_grams_alone_tell_of_all_arms_with_n_grams():
    estimator, arms = made(limits=Limits(4, 2, ngram=True)), Limits(4, 2, ngram=True).arms()
    whole = OutputEvaluation(
        0, 100, 100, (100, 60, 50, 50, 40, 35), (0, 60, 50, 0, 20, 15), (100, 120, 150, 150, 140, 140)
    )
    alone = OutputEvaluation(0, 100, 100, (100, 80), (0, 0), (100, 200))
    tokens = []
    estimator.observe(KEY, [StepRecord(0, 2, Arm(0), 0.02, (2,), 100.0, num_verified_tokens=2)], "w")
    assert min(row.expected_tokens for row in estimator.rows(KEY)) >= 1, "no step generates less"
    for evaluation in (whole, alone):
        for seq in range(40):
            step = StepRecord(seq, 2, Arm(0), 0.02, (2,), 100.0, evaluations=(evaluation,), num_verified_tokens=2)
            estimator.observe(KEY, [step], "w")
        of_arm = {row.arm: row.expected_tokens for row in estimator.rows(KEY) if row.batch_min == 2}
        tokens.append([of_arm[arm] for arm in arms])
    (plain, one, _, ngram, *_), (later_plain, later_one, _, later_ngram, later_both, _) = tokens
    assert ngram == pytest.approx(2.0, abs=0.1)
    assert later_ngram == pytest.approx(1.54, abs=0.1), "half of the outputs"
    assert later_both < 2.2
    assert (later_plain, later_one) == pytest.approx((plain, one), abs=0.02)
