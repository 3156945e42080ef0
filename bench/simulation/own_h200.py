"""Our own engine on the same H200: lengths and n-grams, with off-policy evaluation of some finished outputs.

own-h200.json has sums over blocks of 5 s, not steps. Milliseconds a step (tokens a row), recorded and here, by requests at
a time; fixed lengths and n-grams alone:

    at once   plain   1           3           5           8           n-gram
    2         6.0     7.2 (1.9)   9.6 (2.8)   12.1 (3.3)  13.7 (3.8)  6.2 (1.8)
    4         6.5     8.8 (1.8)   11.6 (2.6)  14.6 (3.2)  17.4 (3.5)  7.3 (1.9)
    8         6.9     10.8 (1.7)  13.3 (2.5)  15.5 (2.8)  17.5 (3.0)  8.0 (1.5)

So a draft pass takes some 1.1 ms, and drafting as such as much again per doubling of its rows beyond two. There are no
times of single steps: level and noise are vLLM's (same machine, see `level.py`). Texts are made up to have these tokens.
A step that drafts after one without is longer (`catch_up`), one with prompts takes PREFILL_S more (`prefill`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speclen.bench.simulation.level import Bursts, Level, noisy
from speclen.bench.simulation.play import Step, best_arm
from speclen.bench.simulation.texts import ARMS, EASY_SHARE, LIMITS, MAX_BATCH, Outputs, proposals
from speclen.records import NUM_CLASSES, Arm, OutputEvaluation, StepFlag, StepRecord

PREFILL_S = 0.004
SWEEP, BURST_S = (1, 2, 4, 8, 16), (3.0, 5.0)
NUM_TEXTS = 250  # drawn per world; requests take any of them
# Share of outputs that the worker has time to evaluate for every arm, others for n-grams alone: as at 16 chat requests.
EVALUATED = 0.12
PROMPT_TOKENS = 100


class Machine(NamedTuple):
    """Seconds of the parts of a step where no time is slow.

    drafting_s: of a step that drafts, per doubling of its drafting rows beyond two.
    """

    overhead_s: float = 0.0057
    row_s: float = 0.00012
    pass_s: float = 0.00108
    drafting_s: float = 0.0011
    token_s: float = 0.00002

    def step_s(self, batch: float, drafting: float, passes: float, verified: float) -> float:
        """Mean seconds of a step."""
        drafts_s = self.pass_s * passes + self.rows_s(drafting) if passes else 0.0
        return float(self.overhead_s + self.row_s * batch + drafts_s + self.token_s * (verified - batch))

    def rows_s(self, drafting: float) -> float:
        """Seconds that a step with so many drafting rows takes beside its draft passes."""
        return self.drafting_s * float(np.log2(max(drafting, 2.0) / 2.0))

    def slower(self, factor: float, *parts: str) -> Machine:
        """Another machine, some of whose parts take so many times as long."""
        return self._replace(**{part: getattr(self, part) * factor for part in parts})


class Stage(NamedTuple):
    """A stretch of a world's time. start: share of the time before it; easy_share: of its outputs."""

    start: float
    machine: Machine
    easy_share: float = EASY_SHARE


class Truth:
    """True means of a machine with some outputs, and the oracle's arm of every batch size."""

    arms = ARMS

    def __init__(self, machine: Machine, outputs: Outputs) -> None:
        self.machine, self.outputs = machine, outputs
        best = [best_arm(self, batch) for batch in range(1, MAX_BATCH + 1)]
        self.best = [0, *map(ARMS.index, best)]
        self.best_s = [0.0, *(self.expected(batch, arm)[0] for batch, arm in enumerate(best, 1))]

    def expected(self, batch_size: int, arm: Arm) -> tuple[float, float]:
        """Mean seconds of a step outside slow seconds, and tokens per row."""
        steps, drafting, verified = self.outputs.walks[:, :, ARMS.index(arm)].sum(axis=0)
        share = drafting / steps
        passes = arm.speculation_length * (1.0 - (1.0 - share) ** batch_size)
        seconds = self.machine.step_s(batch_size, share * batch_size, passes, batch_size * verified / steps)
        return seconds, float(self.outputs.num_tokens.sum() / steps)


class OwnH200:
    """One worker that drafts, proposes n-grams, and evaluates outputs."""

    arms, limits = ARMS, LIMITS

    def __init__(
        self, seed: int = 0, duration_s: float = 120.0, stages: Sequence[Stage] = (Stage(0.0, Machine()),)
    ) -> None:
        rng = np.random.default_rng([seed, 23])
        self.now_s, self.duration_s = 0.0, duration_s
        self._bursts = Bursts(rng, duration_s, SWEEP, BURST_S)
        self._level = Level(rng, duration_s, self._bursts.starts)
        self._rng, self._requests = np.random.default_rng([seed, 24]), np.random.default_rng([seed, 25])
        outputs = {share: Outputs(rng, NUM_TEXTS, share) for share in dict.fromkeys(each.easy_share for each in stages)}
        self._starts = [stage.start * duration_s for stage in stages]
        self._truths = [Truth(stage.machine, outputs[stage.easy_share]) for stage in stages]
        self._seq, self._last, self._used = 0, Arm(0), set[tuple[int, Arm]]()
        self._begin()

    @property
    def outputs(self) -> Outputs:
        """Outputs of the stage."""
        return self._truth.outputs

    def expected(self, batch_size: int, arm: Arm) -> tuple[float, float]:
        """Mean seconds of a step outside slow seconds, and tokens per row."""
        return self._truth.expected(batch_size, arm)

    def _place(self) -> tuple[int, int]:
        """Numbers of the present burst and stage."""
        return self._bursts.index_at(self.now_s), bisect_right(self._starts, self.now_s) - 1

    def _begin(self) -> None:
        """Begin a burst or a stage, with new requests."""
        self._burst_and_stage = burst, stage = self._place()
        self._truth, load = self._truths[stage], self._bursts.loads[burst]
        self._text, self._at = self._requests.integers(NUM_TEXTS, size=load), np.zeros(load, dtype=int)
        self._new = load

    @property
    def batch_size(self) -> int:
        """Rows that decode in the next step."""
        return len(self._text)

    @property
    def with_prompts(self) -> bool:
        """True if the next step follows the prefill of new requests."""
        return self._new > 0

    def step(self, arm: Arm, probe_id: int = 0) -> Step:
        """Take a step."""
        batch, level = self.batch_size, self._level.at(self.now_s)
        here, left = self.outputs.arrays[:, self._text, self._at], self.outputs.num_tokens[self._text] - 1 - self._at
        by_ngram, offered, accepted = proposals(here, arm.ngram, arm.speculation_length, left)
        drafts = ~by_ngram & (arm.speculation_length > 0)
        num_drafting, num_verified = int(drafts.sum()), batch + int(offered.sum())
        passes = arm.speculation_length if num_drafting else 0
        flags, extra_s = self._flags(arm, passes, num_drafting)
        mean_s = self._truth.machine.step_s(batch, num_drafting, passes, num_verified)
        spent_s, work_s = level * (mean_s + extra_s), level * self._oracle_s(arm)
        happened_s = noisy(spent_s + PREFILL_S * self.with_prompts, self._rng)
        most = arm.max_tokens
        self._seq += 1
        record = StepRecord(
            *(self._seq, batch, arm, happened_s, tuple(np.bincount(accepted, minlength=most + 1).tolist())),
            *(float(PROMPT_TOKENS + self._at.mean()), 1, flags, probe_id, self._by_class(accepted, most)),
            num_drafted_sequences=num_drafting,
            num_verified_tokens=num_verified,
            num_new_sequences=self._new,
            evaluations=self._advance(1 + accepted, happened_s),
        )
        return Step((record,), spent_s, work_s)

    def _oracle_s(self, arm: Arm) -> float:
        """The oracle's time for what the arm's step does on average for these requests."""
        best, worth = self._truth.best[self.batch_size], self.outputs.worth[self._text]
        share = float((worth[:, ARMS.index(arm)] / worth[:, best]).mean())
        return share * self._truth.best_s[self.batch_size]

    def _flags(self, arm: Arm, passes: int, num_drafting: int) -> tuple[frozenset[StepFlag], float]:
        """Flags of a step, and seconds that the change of arm costs."""
        found, extra_s = list[StepFlag](), 0.0
        if passes and not self._last.speculation_length:
            found.append(StepFlag.CATCH_UP)
            extra_s = self._truth.machine.pass_s + self._truth.machine.rows_s(num_drafting)
        if (self.batch_size, arm) not in self._used:
            self._used.add((self.batch_size, arm))
            found.append(StepFlag.FIRST_USE)
        self._last = arm
        return frozenset(found + [StepFlag.PREFILL] * self.with_prompts), extra_s

    def _by_class(self, runs: np.ndarray, most: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        kinds = self.outputs.kinds[self._text]
        counts = np.bincount(kinds * (most + 1) + runs, minlength=NUM_CLASSES * (most + 1))
        rows = counts.reshape(NUM_CLASSES, -1).tolist()
        return tuple((kind, tuple(row)) for kind, row in enumerate(rows) if any(row))

    def _evaluation(self, text: int, whole: bool) -> OutputEvaluation:
        found = self.outputs.evaluations[text]
        if whole:
            return found
        kind, num_output_tokens, num_tokens, *by_arm = found
        return OutputEvaluation(kind, num_output_tokens, num_tokens, *(each[:: len(ARMS) // 2] for each in by_arm))

    def _advance(self, tokens: np.ndarray, seconds: float) -> tuple[OutputEvaluation, ...]:
        """Go on by a step; returns the outputs that ended and were evaluated."""
        self.now_s += seconds
        self._at += tokens
        ended = (self._at >= self.outputs.num_tokens[self._text]).nonzero()[0]
        whole = self._rng.random(len(ended)) < EVALUATED
        evaluations = tuple(map(self._evaluation, self._text[ended].tolist(), whole.tolist()))
        self._text[ended], self._at[ended] = self._requests.integers(NUM_TEXTS, size=len(ended)), 0
        self._new = len(ended)
        if self._place() != self._burst_and_stage:
            self._begin()
        return evaluations
