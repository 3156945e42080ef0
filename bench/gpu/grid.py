"""Throughput over batch sizes and lengths, beside transformers, and a short serving run that learns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from speclen.bench.engine.run import EngineBench
from speclen.bench.engine.transformers_baseline import TransformersBaseline
from speclen.bench.gpu.passes import busy_times
from speclen.bench.gpu.sizes import Sizes
from speclen.controller.estimator import Estimator
from speclen.records import ContextKey, Limits, StepRecord
from speclen.worker.drafting.arm_chooser import ArmChoice
from speclen.worker.engine.engine import Engine, EngineConfig
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
            period = statistics.median(step.record.latency_s for step in run.steps)
            cells.append(
                Cell(
                    batch_size,
                    length,
                    batch_size * sizes.new_tokens / run.seconds,
                    statistics.mean(1 + _accepted(step.record) / batch_size for step in run.steps),
                    period,
                    1.0 - statistics.median(busy.seconds()) / period if busy.events else None,
                )
            )
        say(f"batch size {batch_size}: best {max(_of(cells, batch_size), key=lambda cell: cell.tokens_per_s)}")
    return cells


def _of(cells: list[Cell], batch_size: int) -> list[Cell]:
    return [cell for cell in cells if cell.batch_size == batch_size]


def _accepted(record: StepRecord) -> int:
    return record.num_tokens - record.batch_size


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

    wants_evaluations = False

    def __init__(self, key: ContextKey, limits: Limits) -> None:
        self.key = key
        self.estimator = Estimator()
        self.estimator.add_context(key, limits)
        self.num_steps = 0

    def choose(self, batch_size: int, with_prefill: bool = False) -> ArmChoice:
        probe = self.estimator.take_probe(self.key, batch_size=batch_size)
        if probe is not None:
            return ArmChoice(probe.arm, probe_id=probe.probe_id)
        return ArmChoice(self.estimator.table(self.key).arm_for(batch_size))

    def report(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.estimator.observe(self.key, [record._replace(seq=self.num_steps)])


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
        "rows": [row._asdict() | {"arm": str(row.arm)} for row in chooser.estimator.rows(chooser.key)],
    }


def prompt_source(pair: ModelPair) -> PromptSource:
    return PromptSource(pair.tokenizer, held_out_texts(), 0)
