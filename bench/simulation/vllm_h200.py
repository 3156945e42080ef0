"""vLLM 0.32 with a draft model on an H200, as recorded: target of 6.7 B, draft of 125 M, at most 32 rows, length up to 8.

`learner.observe` gets groups of some 5 to 15 `StepRecord`s. They have the flags that the plugin
gives them (`integrations/vllm/timing.py`): a step's time is usable if the two before it and the two after it use its arm,
so a probe takes PROBE_STEPS. A report leaves two steps after its own.

Step times are those of the blocks at fixed lengths (vllm-h200-b.json), relative to length 3 in the same round, since
recorded latencies are shifted by a step; absolute times of length 3 are those of the fast blocks. Length 5 comes from the
blocks of recording a, other lengths are interpolated. Recorded, and here:
- `prefill` and `first_use` steps take as long as others (ratios 1.00 and 1.05), they are only flagged.
- 1.4% of the steps report 0.5 to 3 ms: their result arrived right after the one before, as the queue ran empty.
- Requests keep their acceptance for life: easy ones accept 0.88 of the tokens at each position, hard ones 0.55, in equal
  shares of steps at length 3. Mean tokens per row then are 1.7, 2.2, 2.7, 3.3, 3.9 at lengths 1, 2, 3, 5, 8, as recorded.
- Bursts of 1.5 to 3.5 s sweep over 1 to 32 requests at a time. Off-policy evaluation is not available.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from speclen.bench.simulation.level import Bursts, Level, noisy
from speclen.bench.simulation.play import Step, best_arm
from speclen.integrations.vllm.timing import NUM_BEFORE, StepShape, overlap_flags
from speclen.records import Arm, Limits, StepFlag, StepRecord

MAX_LENGTH, MAX_BATCH = 8, 32
BATCHES = (1, 4, 16, 32)
LENGTH_3_S = (0.0160, 0.0158, 0.0166, 0.0171)
LENGTHS = (0, 1, 2, 3, 5, 8)
RELATIVE_TO_3 = (  # by batch size, of LENGTHS
    (0.62, 0.71, 0.86, 1.0, 1.33, 1.74),
    (0.62, 0.73, 0.86, 1.0, 1.33, 1.70),
    (0.62, 0.72, 0.86, 1.0, 1.33, 1.66),
    (0.62, 0.75, 0.86, 1.0, 1.45, 2.05),
)
SWEEP, BURST_S = (1, 2, 4, 8, 16, 32), (1.5, 3.5)
EASY_SHARE, EASY, HARD, SPREAD = 0.62, 0.88, 0.55, 0.03  # share of requests; chances by position and their sd
OUTPUT_TOKENS, PROMPT_TOKENS = (128, 256), 128
SHORT_SHARE, SHORT_S = 0.014, (0.0005, 0.003)
PROBE_STEPS = 5  # as integrations/vllm/steering.py has them


def step_times() -> np.ndarray:
    """Mean seconds by batch size and length where no time is slow, [MAX_BATCH + 1, MAX_LENGTH + 1]."""
    load = np.log(np.maximum(np.arange(MAX_BATCH + 1), 1))
    rows = np.array([np.interp(np.arange(MAX_LENGTH + 1), LENGTHS, row) for row in RELATIVE_TO_3])
    known = rows * np.array(LENGTH_3_S)[:, None]
    return np.stack([np.interp(load, np.log(BATCHES), column) for column in known.T], axis=1)


class VllmH200:
    """One worker."""

    def __init__(self, seed: int = 0, duration_s: float = 120.0) -> None:
        rng = np.random.default_rng([seed, 13])
        self.now_s, self.duration_s = 0.0, duration_s
        self.limits = Limits(MAX_BATCH, MAX_LENGTH)
        self.arms = tuple(self.limits.arms())
        self._seq = 0
        self._bursts = Bursts(rng, duration_s, SWEEP, BURST_S)
        self._level = Level(rng, duration_s, self._bursts.starts)
        self._rng, self._requests = np.random.default_rng([seed, 14]), np.random.default_rng([seed, 15])
        self._times = step_times()
        self._mean_tokens = population_tokens()
        self._best = [0] + [best_arm(self, batch).speculation_length for batch in range(1, MAX_BATCH + 1)]
        self._last, self._queue = Arm(0), Queue()
        self._burst = -1
        self._begin_burst(0)

    def expected(self, batch_size: int, arm: Arm) -> tuple[float, float]:
        """Mean seconds of a step outside slow seconds, and tokens per row."""
        return float(self._times[batch_size, arm.speculation_length]), float(self._mean_tokens[arm.speculation_length])

    def _begin_burst(self, index: int) -> None:
        self._burst, load = index, self._bursts.loads[index]
        self._chance, self._left, self._held = np.zeros(load), np.zeros(load, dtype=int), np.zeros(load)
        self._tokens = np.ones((load, MAX_LENGTH + 1))
        self._admit(np.arange(load))
        self._decoding = np.arange(load)

    def _admit(self, rows: np.ndarray) -> None:
        count, rng = len(rows), self._requests
        easy = rng.random(count) < EASY_SHARE
        chance = np.where(easy, EASY, HARD) + SPREAD * rng.standard_normal(count)
        self._chance[rows] = np.clip(chance, 0.05, 0.97)
        self._left[rows] = rng.integers(*OUTPUT_TOKENS, size=count)
        self._held[rows] = PROMPT_TOKENS
        self._tokens[rows] = mean_tokens(self._chance[rows])

    @property
    def batch_size(self) -> int:
        """Rows that decode in the next step."""
        return len(self._decoding)

    @property
    def with_prompts(self) -> bool:
        """True if the next step computes prompts, too."""
        return len(self._decoding) < len(self._left)

    def step(self, arm: Arm, probe_id: int = 0) -> Step:
        """Take a step; the drafts that it verifies and those that it makes are of this arm."""
        batch, rows, level = self.batch_size, self._decoding, self._level.at(self.now_s)
        mean_s = float(self._times[batch, arm.speculation_length]) * level
        happened_s = noisy(0.5 * (mean_s + float(self._times[batch, self._last.speculation_length]) * level), self._rng)
        self._last = arm
        best = self._best[batch]
        worth = (self._tokens[rows, arm.speculation_length] / self._tokens[rows, best]).mean()
        work_s = float(worth * self._times[batch, best]) * level
        runs = self._runs(rows, arm.speculation_length)
        self._seq += 1
        histogram = tuple(np.bincount(runs, minlength=arm.speculation_length + 1).tolist())
        ran_empty = self._rng.random() < SHORT_SHARE
        latency_s = float(self._rng.uniform(*SHORT_S)) if ran_empty else happened_s
        record = StepRecord(
            *(self._seq, batch, arm, latency_s, histogram, float(self._held[rows].mean()), 1),
            probe_id=probe_id,
            num_drafted_sequences=batch if arm.speculation_length else 0,
            num_verified_tokens=batch * (1 + arm.speculation_length),
        )
        self._queue.add(record, self.with_prompts, ran_empty)
        if not self._advance(rows, 1 + runs, happened_s):
            self._queue.drain()
        return Step(self._queue.take(), mean_s, work_s)

    def _runs(self, rows: np.ndarray, length: int) -> np.ndarray:
        accepted = np.log(self._rng.random(len(rows))) / np.log(self._chance[rows])
        return np.minimum(accepted.astype(int), length)

    def _advance(self, rows: np.ndarray, tokens: np.ndarray, seconds: float) -> bool:
        """Go on by a step; False if the burst ended with it."""
        self.now_s += seconds
        self._left[rows] -= tokens
        self._held[rows] += tokens
        if (index := self._bursts.index_at(self.now_s)) != self._burst:
            self._begin_burst(index)
            return False
        rest = self._left > 0
        self._admit((~rest).nonzero()[0])
        # Where all end at once the next step decodes nothing, and is not reported.
        self._decoding = rest.nonzero()[0] if rest.any() else np.arange(len(rest))
        return True


class Queue:
    """Steps in flight and the flags of their reports, by the plugin's rule for steps that overlap."""

    def __init__(self) -> None:
        self._before: deque[StepShape] = deque(maxlen=NUM_BEFORE)
        self._pending: deque[tuple[StepRecord, StepShape]] = deque()
        self._seen: set[tuple[int, int, int]] = set()
        self._reports: list[StepRecord] = []

    def add(self, record: StepRecord, with_prefill: bool, ran_empty: bool) -> None:
        """A step. The one before it drafted what it verifies, so the flags of the one before that are known."""
        length = record.arm.speculation_length
        if self._pending:
            self._drafted(self._pending[-1][1], length)
        was_queued = bool(self._pending) and not ran_empty
        self._pending.append(
            (record, StepShape(record.batch_size, length, length, with_prefill, was_queued=was_queued))
        )
        if len(self._pending) > 2:
            self._report(self._pending[1][1])

    def drain(self) -> None:
        """Nobody asks for more: the last step has no one behind it."""
        self._drafted(self._pending[-1][1], self._pending[-1][1].verified)
        while self._pending:
            self._report(self._pending[1][1] if len(self._pending) > 1 else None)

    def take(self) -> tuple[StepRecord, ...]:
        """Reports since the last call."""
        reports, self._reports = tuple(self._reports), []
        return reports

    def _drafted(self, shape: StepShape, length: int) -> None:
        shape.drafted = length
        key = (shape.num_decoding, shape.verified, length)
        shape.is_first = key not in self._seen
        self._seen.add(key)

    def _report(self, following: StepShape | None) -> None:
        record, shape = self._pending.popleft()
        flags = overlap_flags(self._before, shape, following)
        flags |= {StepFlag.PREFILL} if shape.with_prefill else set()
        flags |= {StepFlag.FIRST_USE} if shape.is_first else set()
        self._reports.append(record._replace(flags=frozenset(flags)))
        self._before.append(shape)


def population_tokens() -> np.ndarray:
    """Tokens per row and step of all requests, each for as many steps as it takes: a harmonic mean, [lengths]."""
    steps = 1.0 / mean_tokens(np.array([EASY, HARD]))
    mean: np.ndarray = 1.0 / (EASY_SHARE * steps[0] + (1.0 - EASY_SHARE) * steps[1])
    return mean


def mean_tokens(chance: np.ndarray) -> np.ndarray:
    """Expected tokens of requests that accept each position with that chance, bonus included, [requests, lengths]."""
    tokens: np.ndarray = np.cumsum(chance[:, None] ** np.arange(MAX_LENGTH + 1), axis=1)
    return tokens
