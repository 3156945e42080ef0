"""Throughput over batch sizes and lengths, beside transformers, and a short serving run that learns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from speclen.bench.engine.run import EngineBench
from speclen.bench.engine.transformers_baseline import TransformersBaseline
from speclen.bench.gpu.passes import busy_times
from speclen.bench.gpu.sizes import Sizes
from speclen.controller.estimator.core import ContextKey, Limits, StepObservation
from speclen.controller.estimator.estimator import Estimator
from speclen.controller.wire.flags import named_flags
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.length_chooser import LengthChoice, StepResult
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.prompts import PromptSource, held_out_texts
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """step_s: median period from step to step. host_share: part of it in which the device had nothing to do."""

    batch_size: int
    speculation_length: int
    tokens_per_s: float
    tokens_per_step: float
    step_s: float
    host_share: float | None


def run_grid(bench: EngineBench, source: PromptSource, sizes: Sizes, say: Say) -> list[Cell]:
    """Every batch size at every length; a first run of each, a short one, records what is not yet and does not count."""
    cells = []
    for batch_size in sizes.batch_sizes:
        prompts = [source.draw(sizes.prompt_tokens) for _ in range(batch_size)]
        for length in sizes.lengths:
            bench.run(prompts, max(4, sizes.new_tokens // 8), length)
            with busy_times(bench.engine.pair.device) as busy:
                run = bench.run(prompts, sizes.new_tokens, length)
            if not run.steps:
                continue  # too few tokens for a step of all rows at this length
            period = statistics.median(step.result.latency_s for step in run.steps)
            cells.append(
                Cell(
                    batch_size,
                    length,
                    batch_size * sizes.new_tokens / run.seconds,
                    statistics.mean(1 + _accepted(step.result) / batch_size for step in run.steps),
                    period,
                    1.0 - statistics.median(busy.seconds()) / period if busy.events else None,
                )
            )
        say(f"batch size {batch_size}: best {max(_of(cells, batch_size), key=lambda cell: cell.tokens_per_s)}")
    return cells


def _of(cells: list[Cell], batch_size: int) -> list[Cell]:
    return [cell for cell in cells if cell.batch_size == batch_size]


def _accepted(result: StepResult) -> int:
    return sum(j * count for j, count in enumerate(result.accepted_histogram))


def run_baselines(pair: ModelPair, source: PromptSource, sizes: Sizes) -> list[dict[str, Any]]:
    """transformers' eager generate at every batch size, and assisted generation at batch size 1."""
    baseline = TransformersBaseline(pair)
    rows: list[dict[str, Any]] = []
    for batch_size in sizes.batch_sizes:
        prompts = [source.draw(sizes.prompt_tokens) for _ in range(batch_size)]
        baseline.generate(prompts, 4)
        seconds = baseline.generate(prompts, sizes.baseline_tokens)
        rows.append(
            {"what": "generate", "batch_size": batch_size, "tokens_per_s": batch_size * sizes.baseline_tokens / seconds}
        )
    prompts = [source.draw(sizes.prompt_tokens)]
    for length in (None, 3, 6):
        baseline.assisted(prompts, 4, length)
        seconds = baseline.assisted(prompts, sizes.baseline_tokens, length)
        what = f"assisted, length {'default' if length is None else length}"
        rows.append({"what": what, "batch_size": 1, "tokens_per_s": sizes.baseline_tokens / seconds})
    return rows


class LearningChooser:
    """The controller's estimator in this process: no service, the same choices."""

    def __init__(self, key: ContextKey, limits: Limits) -> None:
        self.key = key
        self.estimator = Estimator()
        self.estimator.add_context(key, limits)
        self.num_steps = 0

    def choice_for(
        self, batch_size: int, with_prompts: bool = False, rows_by_class: tuple[int, ...] = ()
    ) -> LengthChoice:
        probe = self.estimator.take_probe(self.key, batch_size)
        if probe is not None:
            return LengthChoice(probe.speculation_length, probe_id=probe.probe_id)
        return LengthChoice(self.estimator.length_for(self.key, batch_size))

    def report(self, choice: LengthChoice, result: StepResult) -> None:
        self.num_steps += 1
        meaning = named_flags(" ".join(flag.value for flag in result.flags))
        step = StepObservation(
            result.batch_size,
            result.speculation_length,
            result.latency_s,
            result.accepted_histogram,
            result.mean_context_length,
            meaning.teaches_latency,
            meaning.teaches_acceptance,
            result.class_histograms,
        )
        self.estimator.observe(self.key, [step])


def serve_and_learn(pair: ModelPair, source: PromptSource, sizes: Sizes) -> dict[str, Any]:
    """Serve requests whose number changes all the time, without a profile; what was learned."""
    limits = Limits(sizes.batch_sizes[-1], sizes.lengths[-1])
    chooser = LearningChooser(ContextKey(pair.target_name, pair.draft_name, str(pair.device), str(pair.dtype)), limits)
    config = EngineConfig(
        max_batch_size=limits.max_batch_size, max_speculation_length=limits.max_speculation_length, check_models=False
    )
    engine, dice, end = Engine(pair, config, chooser), random.Random(0), time.monotonic() + sizes.serving_s
    wanted = num_submitted = num_tokens = 0

    def count(output: SequenceOutput) -> None:
        nonlocal num_tokens
        num_tokens += len(output.token_ids)

    while time.monotonic() < end:
        load = engine.load()
        if load.num_running + load.num_waiting <= wanted // 2:
            wanted = dice.choice(sizes.batch_sizes)
        for _ in range(wanted - load.num_running - load.num_waiting):
            num_submitted += 1
            sampling = SamplingParams(max_tokens=sizes.new_tokens, ignore_eos=True)
            engine.submit(GenerationRequest(str(num_submitted), source.draw(sizes.prompt_tokens), sampling), count)
        engine.step()
    return {
        "seconds": sizes.serving_s,
        "num_steps": chooser.num_steps,
        "tokens_per_s": num_tokens / sizes.serving_s,
        "rows": [asdict(row) for row in chooser.estimator.learned_rows(chooser.key)],
    }


def prompt_source(pair: ModelPair) -> PromptSource:
    return PromptSource(pair.tokenizer, held_out_texts(), 0)
