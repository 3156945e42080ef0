"""The guard of one context: when to run trials, what they say, and the arms that are used because of it.

By range of batch sizes (1, 2, 3-4, 5-8, ...) the learned arms or those of the baseline are in use. Trials of the other
side take at most a share of the steps and lose at most a share of the time. The estimator's predictions are not used.
One thread calls it; no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from speclen.controller.baseline.blocks import BLOCK_STEPS, Blocks, Compared, Plan
from speclen.controller.baseline.gain import Gain, gain_of, half_width
from speclen.controller.baseline.tokens import Runs, Spread, compared_tokens, count_runs, tells
from speclen.records import PLAIN, Arm, Choice, Hold, Limits, Probe, StepRecord, Table, Trial

NEAR = 1.5  # a trial may also run at batch sizes larger or smaller by up to this factor
FIRST_TRIAL_ID = 1 << 32  # trials and probes share the field probe_id of reports
NGRAMS = Arm(0, ngram=True)


@dataclass(frozen=True)
class GuardSettings:
    """Shares are of steps and of their time."""

    trial_share: float = 0.02  # of the steps at a range; the steps after a change of arm count
    first_share: float = 0.1  # the same until the better side is in use for certain
    shadow_share: float = 0.05  # the same for workers in shadow
    loss_share: float = 0.003  # of the time that trials may lose
    first_loss_share: float = 0.01  # the same until the better side is in use for certain
    least_trials: int = 6  # before any verdict
    memory: float = 128.0  # trials
    tolerated: float = 0.005  # loss, as a log ratio, up to which learned arms stay in use
    # One-sided, of a single look. A range is looked at after every trial, so 99% over all looks needs more than 99% of each.
    falls_back: float = 0.9995
    returns: float = 0.95
    sure: float = 0.995  # that the learned arms are better, so that trials become rare
    changed_arm: float = 0.25  # weight that earlier trials keep when the learned arm changed while it was out of use


DEFAULT = GuardSettings()


class Verdict(NamedTuple):
    """A change of the side in use at a range of batch sizes. uses_baseline: the side from now on."""

    batch_min: int
    batch_max: int
    uses_baseline: bool
    reason: str


@dataclass(slots=True)
class Range:
    """Evidence and budget of one range of batch sizes. since: steps since the last trial.

    runs, outputs: accepted runs by arm, and steps of every evaluated output by arm, since then.
    """

    trials: deque[Trial] = field(default_factory=lambda: deque(maxlen=512))
    weights: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    uses_baseline: bool = False
    since: int = 0
    runs: dict[Arm, Runs] = field(default_factory=dict)
    outputs: deque[dict[Arm, int]] = field(default_factory=lambda: deque(maxlen=64))
    seconds: float = 0.0
    lost_s: float = 0.0
    learned: Arm | None = None
    gain: Gain | None = None  # of the learned arms here

    def add(self, trial: Trial, settings: GuardSettings) -> None:
        """Take a trial into the evidence."""
        keep = 1.0 - 1.0 / settings.memory
        if self.uses_baseline and self.learned not in (None, trial.learned):
            keep *= settings.changed_arm
        self.learned = trial.learned
        self.weights = deque((keep * weight for weight in self.weights), self.weights.maxlen)
        self.trials.append(trial)
        self.weights.append(1.0)
        self.lost_s += trial.lost_s
        self.gain = gain_of(self.trials, self.weights)

    def is_decided(self, settings: GuardSettings) -> bool:
        """True if the side in use is the better one for certain, or the trials are as many as can count."""
        gain = self.gain
        if gain is None or gain.num_trials < settings.least_trials:
            return False
        wins = self.uses_baseline or gain.log_ratio > half_width(gain, settings.sure)
        return wins or gain.num_trials > 0.9 * settings.memory

    def judge(self, settings: GuardSettings) -> str:
        """Change the side in use if the trials say so; returns the reason, or ""."""
        gain = self.gain
        if gain is None or gain.num_trials < settings.least_trials:
            return ""
        low, high = gain.interval()
        said = (
            f"the learned arms made {gain.ratio:.3f} ({low:.3f} to {high:.3f}) times the baseline's tokens per second"
        )
        if not self.uses_baseline:
            changes = gain.log_ratio + half_width(gain, settings.falls_back) < -settings.tolerated
        else:
            changes = gain.log_ratio - half_width(gain, settings.returns) > 0.0
        if not changes:
            return ""
        self.uses_baseline = not self.uses_baseline
        self.seconds = self.lost_s = 0.0  # trials of the other side have a budget of their own
        return f"{said}: {'the baseline is used' if self.uses_baseline else 'they are used again'}"


def range_of(batch_size: float) -> int:
    """Number of the range that holds a batch size: 1, 2, 3-4, 5-8, ..."""
    return (max(round(batch_size), 1) - 1).bit_length()


def bounds_of(number: int) -> tuple[int, int]:
    """Smallest and largest batch size of a range."""
    return (1 << number - 1) + 1 if number else 1, 1 << number


class Guard:
    """One context's trials. shadow workers use the baseline whatever the verdict is. version: grows with each change."""

    def __init__(self, settings: GuardSettings = DEFAULT) -> None:
        self.settings = settings
        self.ranges: dict[int, Range] = {}
        self.holds: tuple[Hold, ...] = ()
        self.version = 0
        self.num_trials = 0
        self._blocks: dict[str, Blocks] = {}
        self._spreads: dict[Arm, Spread] = {}

    # What is used.

    def overrule(self, learned: Table, baseline: Sequence[Choice], shadow: bool = False) -> Table:
        """The table for workers: the learned one, with baseline or held arms where these are in use."""
        if not baseline and not self.holds:
            return learned
        most = learned.choices[-1].batch_max
        arms = [self._in_use(size, learned, baseline, shadow) for size in range(1, most + 1)]
        choices = []
        for (arm, at), members in groupby(enumerate(arms, 1), lambda each: (each[1], _place(learned, each[0]))):
            sizes = [size for size, _ in members]
            known = learned.choices[at]
            choices.append(Choice(sizes[0], sizes[-1], arm, known.ms_per_token if known.arm == arm else None))
        return Table(learned.version + self.version, tuple(choices))

    def _in_use(self, size: int, learned: Table, baseline: Sequence[Choice], shadow: bool) -> Arm:
        for hold in reversed(self.holds):
            if hold.batch_min <= size <= hold.batch_max and (hold.arm is not None or baseline):
                return arm_of(baseline, size) if hold.arm is None else hold.arm
        if baseline and (shadow or self._range(size).uses_baseline):
            return arm_of(baseline, size)
        return learned.arm_for(size)

    def hold(self, holds: Sequence[Hold], release: bool) -> None:
        """Hold these arms, whatever is learned, in addition to earlier holds. release: end earlier holds first."""
        self.holds = (*(() if release else self.holds), *holds)
        self.version += 1

    def _range(self, batch_size: float) -> Range:
        return self.ranges.setdefault(range_of(batch_size), Range())

    # Trials.

    def next_trial(
        self, worker: str, batch_size: int, learned: Table, baseline: Sequence[Choice], shadow: bool = False
    ) -> Probe | None:
        """A trial for a worker's next steps; mostly None."""
        blocks = self._blocks.get(worker)
        if not baseline or blocks is None:
            return None
        learned_arm, baseline_arm = learned.arm_for(batch_size), arm_of(baseline, batch_size)
        in_use, place = self._in_use(batch_size, learned, baseline, shadow), self._range(batch_size)
        num_steps = BLOCK_STEPS + blocks.transition
        if learned_arm == baseline_arm or in_use not in (learned_arm, baseline_arm):
            return None
        if not self._is_due(place, shadow, num_steps):
            return None
        if not blocks.is_ready(in_use):
            return None
        trial_id = FIRST_TRIAL_ID + self.num_trials + 1
        plan = Plan(trial_id, range_of(batch_size), learned_arm, baseline_arm, in_use == baseline_arm, place.since)
        if not tells(plan, place.outputs):
            return None
        self.num_trials += 1
        blocks.begin(plan)
        place.since = 0
        low, high = max(1, -int(-batch_size // NEAR)), int(batch_size * NEAR)
        return Probe(trial_id, low, high, plan.tried, num_steps, is_trial=True)

    def _is_due(self, place: Range, shadow: bool, num_steps: int) -> bool:
        settings, first = self.settings, not place.is_decided(self.settings)
        share = settings.shadow_share if shadow else settings.first_share if first else settings.trial_share
        allowed_s = (settings.first_loss_share if first else settings.loss_share) * place.seconds
        return place.since >= num_steps / share and place.lost_s <= allowed_s

    def observe(
        self, worker: str, steps: Sequence[StepRecord], transition: int, limits: Limits
    ) -> list[Verdict | Trial]:
        """Take a worker's consecutive steps; returns finished trials, each before the verdict that it brought."""
        blocks = self._blocks.get(worker)
        if blocks is None or blocks.transition != transition:
            blocks = self._blocks[worker] = Blocks(transition)
        arms, found = limits.arms(), list[Verdict | Trial]()
        for step in steps:
            place = self._range(step.batch_size)
            place.since += 1
            place.seconds += step.wall_s
            if not step.probe_id:
                count_runs(place.runs.setdefault(step.arm, Counter()), [step])
            for output in step.evaluations:
                known = arms if len(output.num_steps) == len(arms) else (PLAIN, NGRAMS)
                place.outputs.append(dict(zip(known, output.num_steps, strict=True)))
            compared = blocks.add(step)
            if compared is not None:
                found += self._judge(compared)
        return found

    def _judge(self, compared: Compared) -> list[Verdict | Trial]:
        plan = compared.plan
        place = self.ranges[plan.number]
        used = place.runs.get(plan.in_use, Counter()) + place.runs.get(PLAIN, Counter())
        tried = count_runs(Counter(), compared.steps)
        place.runs = {}
        if compared.log_time is None:
            place.lost_s += compared.extra_s
            return []
        spread = self._spreads.setdefault(plan.tried, Spread())
        spread.add(compared.steps)
        sums = compared_tokens(plan, used, tried, place.outputs, spread)
        if sums is None:
            return []
        place.outputs.clear()
        trial = Trial(
            compared.batch_size,
            plan.learned,
            plan.baseline,
            compared.log_time if plan.uses_baseline else -compared.log_time,
            *sums,
            num_steps=plan.num_steps,
            is_baseline_used=plan.uses_baseline,
        )
        gain = gain_of([*place.trials, trial], [*place.weights, 1.0])
        better = -gain.log_ratio if plan.uses_baseline else gain.log_ratio  # the arm in use, by all evidence here
        lost_s = compared.seconds * max(0.0, 1.0 - math.exp(-better)) + compared.extra_s
        trial = trial._replace(lost_s=lost_s)
        return [trial, *self.take(plan.number, trial)]

    def take(self, number: int, trial: Trial) -> list[Verdict]:
        """Take a trial into the evidence of a range; also one that was stored by an earlier process."""
        place = self.ranges.setdefault(number, Range())
        place.add(trial, self.settings)
        reason = place.judge(self.settings)
        if not reason:
            return []
        self.version += 1
        return [Verdict(*bounds_of(number), place.uses_baseline, reason)]


def arm_of(baseline: Sequence[Choice], batch_size: int) -> Arm:
    """The baseline's arm at a batch size; beyond its ranges that of the last."""
    return Table(0, tuple(baseline)).arm_for(batch_size)


def _place(table: Table, batch_size: int) -> int:
    """Number of the choice that holds a batch size."""
    last = len(table.choices) - 1
    return next((at for at, choice in enumerate(table.choices) if batch_size <= choice.batch_max), last)
