"""Measurement of an offline profile on the real engine: times of whole steps, and acceptance by draft position.

The grid of batch sizes and speculation lengths is visited in rounds until the time is up. A round draws a context length
and new prompts and visits the cells in random order, a few steps each, so that changes of the machine and of the context
affect all cells alike. The first round goes down from the largest batch size with one step per cell and the shortest
prompts: it finds out what fits in memory, and gives a rough profile quickly.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from speclen.records import PLAIN, Arm, Profile, ProfileCell, StepFlag, StepRecord
from speclen.worker.arms import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.prompts import PromptSource
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams, SequenceOutput

Key = tuple[int, int]  # batch size, speculation length
Step = tuple[float, float, int]  # latency_s, mean context length, number of its round, which visits each cell once

ASSUMED_DEVIATION = 0.1  # relative standard deviation of a visit, for cells with fewer than three
LEAST_DEVIATION = 0.01  # smallest relative standard deviation, so that no cell counts as certain
# Bound on the output: in long outputs small models repeat themselves, which a draft model predicts too easily.
ANSWER_TOKENS = 160
QUICK_LENGTHS = (0, 1, 2, 3, 4, 6, 8)


def measured_cell(key: Key, steps: Sequence[Step]) -> ProfileCell:
    """Estimate a cell from at least one step, by medians, since a pause of the machine makes a step several times as long.

    Steps of one visit share the sequences and the machine's state, so the standard error comes from the variance of visits.
    """
    latencies, contexts, visits = np.array(steps).T
    times = np.array([np.median(latencies[visits == visit]) for visit in np.unique(visits)])
    if len(times) < 3:
        mean, deviation = float(times.min()), ASSUMED_DEVIATION * float(times.min())
    else:
        mean = float(np.median(times))
        deviation = max(1.4826 * float(np.median(np.abs(times - mean))), LEAST_DEVIATION * mean)
    # The median's standard error is 1.25 times the mean's.
    return ProfileCell(*key, mean, 1.25 * deviation / len(times) ** 0.5, len(steps), float(contexts.mean()))


def survival(histograms: Mapping[int, Sequence[int]]) -> tuple[list[float], list[int]]:
    """Kaplan-Meier estimate of survival by draft position, and the number of sequences that reached each position.

    histograms[s][j]: sequences that accepted exactly j of s draft tokens; a run of s is censored there. survival[i] is the
    product of the acceptance rates of positions 0..i. A position that no sequence reached has the rate of the one before.
    """
    longest = max(histograms, default=0)
    reached, accepted = np.zeros(longest, dtype=int), np.zeros(longest, dtype=int)
    for length, histogram in histograms.items():
        at_least = np.cumsum(np.asarray(histogram)[::-1])[::-1]  # at_least[j]: sequences with j or more
        reached[:length] += at_least[:length]
        accepted[:length] += at_least[1 : length + 1]
    shares: list[float] = []
    for count, rows in zip(accepted, reached, strict=True):
        shares.append(count / rows if rows else shares[-1] if shares else 0.0)
    return [float(value) for value in np.cumprod(shares)], [int(value) for value in reached]


@dataclass(slots=True)
class ProfileSamples:
    """Measured steps by cell, and accepted runs by speculation length.

    histograms[length][j]: sequences that accepted exactly j draft tokens. elapsed_s: measuring time. largest_batch_size: set
    if larger ones did not fit in memory.
    """

    steps: dict[Key, list[Step]] = field(default_factory=dict)
    histograms: dict[int, list[int]] = field(default_factory=dict)
    elapsed_s: float = 0.0
    num_rounds: int = 0
    largest_batch_size: int | None = None

    def add(self, step: StepRecord) -> None:
        """Add a step without flags."""
        length = step.arm.speculation_length
        key = (step.batch_size, length)
        self.steps.setdefault(key, []).append((step.latency_s, step.mean_context_length, self.num_rounds))
        counts = self.histograms.setdefault(length, [0] * (length + 1))
        for run, rows in enumerate(step.accepted_histogram):
            counts[run] += rows

    def result(self) -> Profile:
        """The profile of the cells measured so far."""
        cells = tuple(measured_cell(key, steps) for key, steps in sorted(self.steps.items()))
        values, rows = survival(self.histograms)
        return Profile(cells, tuple(values), tuple(rows))


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """Grid and time of a profile."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)  # sequences decoding in one step
    lengths: tuple[int, ...] = tuple(range(9))  # speculation lengths, 0 included
    budget_s: float = 150.0  # measuring time; loading the models comes on top
    steps_per_visit: int = 3  # steps measured at a visit; every visit costs a step or two that do not count
    prompt_tokens: tuple[int, ...] = (32, 96, 256)  # context lengths at the start of a round; cut to the models' limit
    temperature: float = 0.0  # of the sampling that survival is measured under; 0 is greedy
    seed: int = 0
    backend: str = "auto"  # of the engine, see EngineConfig
    check_models: bool = True  # False: for experiments with models whose outputs depend on the batch


def quick_settings(max_batch_size: int, max_length: int, budget_s: float) -> ProfileSettings:
    """Settings of a coarse grid up to a worker's limits: batch sizes 1, 2, 4, ..., some lengths, short contexts."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power <= max_batch_size]
    lengths = tuple(length for length in QUICK_LENGTHS if length <= max_length)
    return ProfileSettings(
        tuple(sorted({*sizes, max_batch_size})), lengths, budget_s, steps_per_visit=2, prompt_tokens=(32, 128)
    )


def fit_settings(pair: ModelPair, settings: ProfileSettings) -> ProfileSettings:
    """The settings with prompts cut to leave room in the context.

    Raises ValueError, naming the setting, if the models cannot run it.
    """
    if pair.draft is None and settings.lengths != (0,):
        raise ValueError("lengths over 0 need a draft; without one only length 0 can be profiled")
    context = pair.draft_context_length or pair.max_context_length
    room = context - 4 * (settings.lengths[-1] + 1)
    if room < 2:
        raise ValueError(f"length {settings.lengths[-1]} does not fit in a context of {context} tokens")
    prompts = sorted({min(tokens, room // 2) for tokens in settings.prompt_tokens})
    return replace(settings, prompt_tokens=tuple(prompts))


class Profiler:
    """Measures one profile. on_progress: called with the seconds so far, about once per visited cell."""

    def __init__(
        self,
        pair: ModelPair,
        settings: ProfileSettings,
        source: PromptSource,
        on_progress: Callable[[float], None] = lambda elapsed_s: None,
    ) -> None:
        self.settings = fit_settings(pair, settings)
        self.samples = ProfileSamples()
        # Enough tokens for every length once, but no more than an answer has.
        most = 2 * (settings.steps_per_visit + 2) * sum(length + 1 for length in settings.lengths)
        self._max_tokens = min(ANSWER_TOKENS, most)
        self._source = source
        self._on_progress = on_progress
        self._random = random.Random(settings.seed)
        self._chooser = FixedArm(PLAIN)
        self._settling_length = 1 if pair.draft is not None else 0
        self._rows: dict[str, None] = {}  # ids of running requests, oldest first
        self._num_submitted = 0
        self._failed = False  # True if the engine aborted sequences
        config = EngineConfig(
            max_batch_size=settings.batch_sizes[-1],
            max_speculation_length=settings.lengths[-1],
            backend=settings.backend,
            check_models=settings.check_models,
        )
        self._engine = Engine(pair, config, self._chooser)
        self._started = 0.0

    def _sizes(self) -> list[int]:
        """Batch sizes of the grid that fit in memory, and the largest one that fits if it is not in the grid."""
        limit = self.samples.largest_batch_size
        if limit is None:
            return list(self.settings.batch_sizes)
        return sorted({size for size in self.settings.batch_sizes if size <= limit} | {limit})

    # The loop.

    def run(self) -> ProfileSamples:
        """Measure until the time is up."""
        self._started = time.perf_counter()
        try:
            while self._elapsed() < self.settings.budget_s:
                self._round()
                self.samples.num_rounds += 1
        finally:
            self.samples.elapsed_s = self._elapsed()
        return self.samples

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    def _round(self) -> None:
        sizes = self._sizes()
        sizes = self._random.sample(sizes, len(sizes)) if self.samples.num_rounds else sizes[::-1]
        prompts = self.settings.prompt_tokens
        prompt_tokens = self._random.choice(prompts) if self.samples.num_rounds else prompts[0]
        self._resize(0, prompt_tokens)
        for number, size in enumerate(sizes, 1):
            # In the first round each batch size has an equal share of the time, so that all are reached.
            end = self.settings.budget_s * (1.0 if self.samples.num_rounds else number / len(sizes))
            for length in self._ordered(list(self.settings.lengths)):
                if self._elapsed() >= end or size not in self._sizes():
                    break  # out of time, or this many sequences do not fit
                if self._resize(size, prompt_tokens):
                    self._visit(size, length)
                self._on_progress(self._elapsed())

    def _ordered(self, lengths: list[int]) -> list[int]:
        """Lengths in random order; in the first round from both ends inwards, so that even a short one covers the range."""
        if self.samples.num_rounds:
            return self._random.sample(lengths, len(lengths))
        return sorted(lengths, key=lambda length: min(lengths.index(length), len(lengths) - 1 - lengths.index(length)))

    def _visit(self, batch_size: int, length: int) -> None:
        """Measure a few steps of one cell, leaving out flagged steps and those in which a sequence ended."""
        self._chooser.arm = Arm(length)
        num_measured, num_wanted = 0, self.settings.steps_per_visit if self.samples.num_rounds else 1
        for _ in range(num_wanted + 3):
            step = self._engine.step()
            if step is None or step.flags or (step.batch_size, step.arm) != (batch_size, Arm(length)):
                continue
            self.samples.add(step)
            num_measured += 1
            if num_measured == num_wanted:
                return

    # Rows.

    def _resize(self, batch_size: int, prompt_tokens: int) -> bool:
        """Bring the number of decoding sequences to batch_size. False if they do not fit, which is noted, or time is up."""
        for request_id in list(self._rows)[: max(0, len(self._rows) - batch_size)]:
            del self._rows[request_id]
            self._engine.abort(request_id)
        self._chooser.arm = Arm(self._settling_length)
        while True:
            # Sequences that have ended meanwhile are replaced.
            for _ in range(batch_size - len(self._rows)):
                self._submit(prompt_tokens)
            step = self._engine.step()
            load = self._engine.load()
            if not batch_size and not load.num_running and not load.num_waiting:
                return True
            if step is not None and step.batch_size == batch_size and StepFlag.PREFILL not in step.flags:
                return True
            if batch_size and self._elapsed() >= self.settings.budget_s:
                return False
            if self._failed or (load.num_waiting and step is not None and StepFlag.PREFILL not in step.flags):
                self.samples.largest_batch_size = max(1, batch_size // 2 if self._failed else load.num_running)
                self._failed = False
                return False

    def _submit(self, prompt_tokens: int) -> None:
        self._num_submitted += 1
        request_id = f"profile-{self._num_submitted}"
        sampling = SamplingParams(
            max_tokens=self._max_tokens,
            ignore_eos=True,
            temperature=self.settings.temperature,
            seed=self._num_submitted,
        )
        self._rows[request_id] = None
        request = GenerationRequest(request_id, self._source.draw(prompt_tokens), sampling)
        self._engine.submit(request, self._receive)

    def _receive(self, output: SequenceOutput) -> None:
        """Note that a sequence ended: at its limit, or aborted by the engine for lack of memory."""
        if output.finish_reason is not None and output.request_id in self._rows:
            del self._rows[output.request_id]
            self._failed = self._failed or output.finish_reason is FinishReason.ABORT
