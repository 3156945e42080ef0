"""The guard of one context: when to run trials, what they say, and the arms that are used because of it.

By range of batch sizes (1, 2, 3-4, 5-8, ...) the learned arms or those of the baseline are in use. Trials of the other
side take at most a share of the steps and lose at most a share of the time. No estimate of the model enters. One thread
calls it; no I/O, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import add
from typing import NamedTuple

from speclen.controller.baseline.acceptance import Acceptance
from speclen.controller.baseline.blocks import BLOCK_STEPS, Blocks, Compared
from speclen.controller.baseline.gain import Gain, gain_of, half_width
from speclen.records import Arm, Choice, Hold, Probe, StepFlag, StepRecord, Table, Trial

NEAR = 1.5  # a trial runs at batch sizes up to so many times larger or smaller
FIRST_TRIAL_ID = 1 << 32  # trials and probes share the field probe_id of reports


@dataclass(frozen=True)
class GuardSettings:
    """Shares are of steps and of their time."""

    trial_share: float = 0.02  # of the steps at a range; a trial and its transition count
    first_share: float = 0.1  # the same until the first verdict
    shadow_share: float = 0.05  # the same for workers in shadow
    loss_share: float = 0.003  # of the time that trials may lose
    first_loss_share: float = 0.01  # the same until the first verdict
    least_trials: int = 6  # before any verdict
    first_verdict: float = 16.0  # effective trials that make the first verdict
    memory: float = 64.0  # effective trials at most
    tolerated: float = 0.005  # log ratio below 0 at which learned arms still stay in use
    # One-sided, of a single look. A range is looked at after every trial, so 99% over all looks needs more than 99% of each:
    # with 0.9995, simulated equal arms fell back less than once in 200 hours.
    falls_back: float = 0.9995
    returns: float = 0.95
    changed_arm: float = (
        0.25  # weight that earlier trials keep when the learned arm has changed while it was out of use
    )


DEFAULT = GuardSettings()


class Verdict(NamedTuple):
    """A change of the side in use at a range of batch sizes. uses_baseline: of now on."""

    batch_min: int
    batch_max: int
    uses_baseline: bool
    reason: str


@dataclass(slots=True)
class Range:
    """Evidence and budget of one range of batch sizes. since: steps since the last trial."""

    trials: deque[Trial] = field(default_factory=lambda: deque(maxlen=512))
    weights: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    acceptance: Acceptance = field(default_factory=Acceptance)
    uses_baseline: bool = False
    since: int = 0
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
            if gain.log_ratio + half_width(gain, settings.falls_back) < -settings.tolerated:
                self.uses_baseline = True
                return f"{said}: the baseline is used"
        elif gain.log_ratio - half_width(gain, settings.returns) > 0.0:
            self.uses_baseline = False
            return f"{said}: they are used again"
        return ""


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
        self._seeking: dict[str, tuple[int, Arm, Arm, bool]] = {}  # by worker: range, learned arm, baseline, in use

    # What is used.

    def table(self, learned: Table, baseline: Sequence[Choice], shadow: bool = False) -> Table:
        """The learned table with baseline arms where these, or a person's, are used. Without a baseline: as learned."""
        if not baseline and not self.holds:
            return learned
        most = learned.choices[-1].batch_max
        arms = [self._in_use(size, learned, baseline, shadow) for size in range(1, most + 1)]
        choices = []
        for place, members in groupby(enumerate(arms, 1), lambda each: (each[1], _place(learned, each[0]))):
            sizes = [size for size, _ in members]
            arm, at = place
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
        """Have these arms used as well, whatever is learned. release: end what was held before."""
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
        if not baseline or blocks is None or blocks.is_busy:
            return None
        mine, its = learned.arm_for(batch_size), arm_of(baseline, batch_size)
        if mine == its or self._in_use(batch_size, learned, baseline, shadow) not in (mine, its):
            return None
        place = self._range(batch_size)
        uses_baseline = shadow or place.uses_baseline
        if not self._is_due(place, shadow):
            return None
        low, high = max(1, -int(-batch_size // NEAR)), int(batch_size * NEAR)
        self.num_trials += 1
        trial_id = FIRST_TRIAL_ID + self.num_trials
        blocks.begin(trial_id)
        self._seeking[worker] = range_of(batch_size), mine, its, uses_baseline
        steps = BLOCK_STEPS
        return Probe(trial_id, low, high, mine if uses_baseline else its, steps, is_trial=True)

    def _is_due(self, place: Range, shadow: bool) -> bool:
        settings, gain = self.settings, place.gain
        first = gain is None or gain.num_trials < settings.first_verdict
        share = settings.shadow_share if shadow else settings.first_share if first else settings.trial_share
        allowed_s = (settings.first_loss_share if first else settings.loss_share) * place.seconds
        return place.since >= BLOCK_STEPS / share and place.lost_s <= allowed_s

    def observe(self, worker: str, steps: Sequence[StepRecord], transition: int) -> list[Verdict | Trial]:
        """Take a worker's consecutive steps; returns finished trials, each before the verdict that it brought."""
        blocks = self._blocks.get(worker)
        if blocks is None or blocks.transition != transition:
            blocks = self._blocks[worker] = Blocks(transition)
        for (number, length), histogram in _runs(steps).items():
            self.ranges.setdefault(number, Range()).acceptance.add(length, histogram)
        found: list[Verdict | Trial] = []
        for step in steps:
            place = self._range(step.batch_size)
            place.since += 1
            place.seconds += step.wall_s
            compared = blocks.add(step)
            if compared is not None:
                found += self._judge(worker, compared)
        return found

    def _judge(self, worker: str, compared: Compared) -> list[Verdict | Trial]:
        number, learned, baseline, uses_baseline = self._seeking.pop(worker)
        place = self.ranges[number]
        sides = (compared.trial, compared.beside) if uses_baseline else (compared.beside, compared.trial)
        pooled = place.acceptance.log_ratio(learned, baseline) if sides[0].arm == learned else None
        log_time = compared.log_time if uses_baseline else -compared.log_time
        log_tokens, stderr = (None, 0.0) if pooled is None else pooled
        trial = Trial(
            batch_size=compared.trial.batch_sizes / compared.trial.num_steps,
            learned=learned,
            baseline=baseline,
            log_time=log_time,
            learned_tokens=sides[0].tokens,
            learned_sequences=sides[0].sequences,
            baseline_tokens=sides[1].tokens,
            baseline_sequences=sides[1].sequences,
            log_tokens=log_tokens,
            log_tokens_stderr=stderr,
            num_steps=place.since,
            is_baseline_used=uses_baseline,
        )
        trial = trial._replace(lost_s=self._lost_s(place, trial, compared))
        return [trial, *self.take(number, trial)]

    def _lost_s(self, place: Range, trial: Trial, compared: Compared) -> float:
        """Seconds that the trial cost by all evidence here, that of this trial included."""
        gain = gain_of([*place.trials, trial], [*place.weights, 1.0])
        if gain is None:
            return 0.0
        tried = (
            gain.log_ratio if trial.is_baseline_used else -gain.log_ratio
        )  # of the arm that was tried over the other
        return compared.trial.seconds * max(0.0, 1.0 - math.exp(tried))

    def take(self, number: int, trial: Trial) -> list[Verdict]:
        """Take a trial into the evidence of a range; also one that was stored by an earlier process."""
        place = self.ranges.setdefault(number, Range())
        place.since = 0
        place.add(trial, self.settings)
        reason = place.judge(self.settings)
        if not reason:
            return []
        self.version += 1
        return [Verdict(*bounds_of(number), place.uses_baseline, reason)]


def arm_of(baseline: Sequence[Choice], batch_size: int) -> Arm:
    """The baseline's arm at a batch size; beyond its ranges that of the last."""
    return Table(0, tuple(baseline)).arm_for(batch_size)


def _runs(steps: Sequence[StepRecord]) -> dict[tuple[int, int], list[int]]:
    """Accepted runs of steps that drafted without n-grams, summed by range of batch sizes and length."""
    found: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        length, ngram = step.arm
        if length and not ngram and StepFlag.MIXED_LENGTHS not in step.flags:
            place = range_of(step.batch_size), length
            known = found.get(place)
            found[place] = (
                list(step.accepted_histogram) if known is None else list(map(add, known, step.accepted_histogram))
            )
    return found


def _place(table: Table, batch_size: int) -> int:
    """Number of the choice that holds a batch size."""
    last = len(table.choices) - 1
    return next((at for at, choice in enumerate(table.choices) if batch_size <= choice.batch_max), last)
