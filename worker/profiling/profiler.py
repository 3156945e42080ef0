"""Measurement of an offline profile on the real engine: whole-step times over batch sizes and lengths, and survival.

The grid is visited in rounds until the time is up. A round draws a context length and new prompts, and visits batch sizes
and lengths in random order, a few steps each, so that changes of the machine and the context affect all cells alike. The
first round goes from the largest batch size down with one step each and the shortest prompts: it finds out what fits in
memory, and gives a rough profile in a short time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from speclen.records import PLAIN, Arm, StepFlag
from speclen.worker.drafting.arm_chooser import FixedArm
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.prompts import PromptSource
from speclen.worker.profiling.stats import ProfileSamples
from speclen.worker.requests.request import FinishReason, GenerationRequest, SamplingParams, SequenceOutput

# Long outputs of small models repeat themselves, which a draft predicts more easily than usual requests.
ANSWER_TOKENS = 160
QUICK_LENGTHS = (0, 1, 2, 3, 4, 6, 8)


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
    """A coarse grid up to a worker's limits: batch sizes 1, 2, 4, ..., some lengths, short contexts."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power <= max_batch_size]
    lengths = tuple(length for length in QUICK_LENGTHS if length <= max_length)
    return ProfileSettings(
        tuple(sorted({*sizes, max_batch_size})), lengths, budget_s, steps_per_visit=2, prompt_tokens=(32, 128)
    )


def fit_settings(pair: ModelPair, settings: ProfileSettings) -> ProfileSettings:
    """The settings with prompts that leave room in the context.

    Raises ValueError naming the setting that the pair cannot do.
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
    """Runs one profile.

    on_progress: called with the seconds so far, about once per visited cell.
    """

    def __init__(
        self,
        pair: ModelPair,
        settings: ProfileSettings,
        source: PromptSource,
        on_progress: Callable[[float], None] = lambda elapsed_s: None,
    ) -> None:
        self.settings = fit_settings(pair, settings)
        self.samples = ProfileSamples()
        # Of an output: enough for every length once, but no more than an answer.
        most = 2 * (settings.steps_per_visit + 2) * sum(length + 1 for length in settings.lengths)
        self._max_tokens = min(ANSWER_TOKENS, most)
        self._source = source
        self._on_progress = on_progress
        self._random = random.Random(settings.seed)
        self._chooser = FixedArm(PLAIN)
        self._settling_length = 1 if pair.draft is not None else 0
        self._rows: dict[str, None] = {}  # ids of running requests, oldest first
        self._num_submitted = 0
        self._failed = False  # True if the engine gave sequences up
        config = EngineConfig(
            max_batch_size=settings.batch_sizes[-1],
            max_speculation_length=settings.lengths[-1],
            backend=settings.backend,
            check_models=settings.check_models,
        )
        self._engine = Engine(pair, config, self._chooser)
        self._started = 0.0

    def _sizes(self) -> list[int]:
        """Batch sizes of the grid that fit, and the largest that fits when that is between two of them."""
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
            # Each batch size of the first round has its share of the time, so that all are reached.
            end = self.settings.budget_s * (1.0 if self.samples.num_rounds else number / len(sizes))
            for length in self._ordered(list(self.settings.lengths)):
                if self._elapsed() >= end or size not in self._sizes():
                    break  # out of time, or so many sequences do not fit
                if self._resize(size, prompt_tokens):
                    self._visit(size, length)
                self._on_progress(self._elapsed())

    def _ordered(self, lengths: list[int]) -> list[int]:
        """Random order; in the first round from the outside in, so that even a short one spans the lengths."""
        if self.samples.num_rounds:
            return self._random.sample(lengths, len(lengths))
        return sorted(lengths, key=lambda length: min(lengths.index(length), len(lengths) - 1 - lengths.index(length)))

    def _visit(self, batch_size: int, length: int) -> None:
        """Measure a few steps of one cell, without flagged steps and ends of sequences."""
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
        """Bring the number of running sequences to batch_size, prompts processed; False if that cannot be.

        Either so many do not fit, which is noted, or the time is up.
        """
        for request_id in list(self._rows)[: max(0, len(self._rows) - batch_size)]:
            del self._rows[request_id]
            self._engine.abort(request_id)
        self._chooser.arm = Arm(self._settling_length)
        while True:
            # Rows that reached their limit meanwhile are replaced.
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
        """Note ended rows: at their limit, or aborted by the engine for lack of memory."""
        if output.finish_reason is not None and output.request_id in self._rows:
            del self._rows[output.request_id]
            self._failed = self._failed or output.finish_reason is FinishReason.ABORT
