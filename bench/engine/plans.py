"""Plans side by side: tokens a second of each beside fixed lengths, on prompts that are repeated and on ordinary ones."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from speclen.bench.machine import machine
from speclen.bench.spread import ratio, spread
from speclen.worker.drafting.plan import Plan, parse_plan
from speclen.worker.engine.copies import find_copies, read_texts
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.length_chooser import FixedPlan, StepFlag, StepResult
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.prompts import PromptSource
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput

KINDS = ("copying", "ordinary")
# What else flags a step, copying for one, is a part of what the plan costs.
DISTURBED = {StepFlag.FIRST_USE, StepFlag.COMPILATION, StepFlag.PREFILL}


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What is measured. Prompts of the kind `copying` end with the first third of what they begin with."""

    backend: str
    plans: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    seed: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to time."""

    kind: str
    temperature: float
    batch_size: int
    plan: Plan


@dataclass(slots=True)
class Timed:
    """Undisturbed steps of the full batch: how many, their tokens and seconds, and seconds spent looking for copies."""

    num_steps: int = 0
    num_tokens: int = 0
    num_proposed: int = 0
    seconds: float = 0.0
    search_s: float = 0.0

    def add(self, result: StepResult, search_s: float) -> None:
        runs = () if result.copying is None else result.copying.runs
        self.num_steps += 1
        self.num_tokens += result.batch_size + sum(run.num_rows * run.num_accepted for run in runs)
        self.num_tokens += sum(at * count for at, count in enumerate(result.accepted_histogram))
        self.num_proposed += sum(run.num_rows * run.num_proposed for run in runs)
        self.seconds += result.latency_s
        self.search_s += search_s


class SearchClock:
    """Adds up the seconds that the engine spends reading texts and looking for copies, until `end`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._patches = [
            mock.patch(f"speclen.worker.engine.engine.{each.__name__}", self._timed(each))
            for each in (read_texts, find_copies)
        ]
        for patch in self._patches:
            patch.start()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return timed

    def end(self) -> None:
        for patch in self._patches:
            patch.stop()


@dataclass(slots=True)
class PlanBench:
    """One engine, run again and again under other plans."""

    pair: ModelPair
    settings: PlanSettings
    plans: list[Plan]
    chooser: FixedPlan = field(default_factory=lambda: FixedPlan(Plan()))
    clock: SearchClock = field(default_factory=SearchClock)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        rows = self.settings.batch_sizes[-1]
        config = EngineConfig(
            max_batch_size=rows,
            max_speculation_length=max(plan.draft_length for plan in self.plans),
            max_copied_tokens=max(plan.copy_max_tokens for plan in self.plans),
            max_cached_tokens=0,
            backend=self.settings.backend,
        )
        self.engine = Engine(self.pair, config, self.chooser)

    def run(self, cell: Cell, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> tuple[float, Timed]:
        """Tokens a second of all prompts from the first to the last one's end, and the steps of the full batch."""
        self.chooser.plan = cell.plan
        unfinished, timed = set(range(len(prompts))), Timed()
        sampling = SamplingParams(temperature=cell.temperature, max_tokens=new_tokens, ignore_eos=True)
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            # With seeds all plans write the same tokens.
            seeded = SamplingParams(**{**_fields(sampling), "seed": number}) if cell.temperature else sampling
            request = GenerationRequest(f"bench-{number}", prompt, seeded)
            self.engine.submit(request, _receiver(number, unfinished))
        while unfinished:
            searched = self.clock.seconds
            result = self.engine.step()
            if result is not None and result.batch_size == len(prompts) and not result.flags & DISTURBED:
                timed.add(result, self.clock.seconds - searched)
        return len(prompts) * new_tokens / (time.perf_counter() - started), timed


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__slots__}


def _receiver(number: int, unfinished: set[int]) -> Callable[[SequenceOutput], None]:
    def receive(output: SequenceOutput) -> None:
        if output.error is not None:
            raise RuntimeError(f"the engine gave up on sequence {number}: {output.error}")
        if output.finish_reason is not None:
            unfinished.discard(number)

    return receive


def draw(source: PromptSource, kind: str, num_tokens: int) -> tuple[int, ...]:
    """A prompt of either kind."""
    if kind == "ordinary":
        return source.draw(num_tokens)
    text = source.draw(num_tokens - num_tokens // 4)
    return text + text[: num_tokens // 4]


def measure_plans(
    pair: ModelPair,
    settings: PlanSettings,
    source: PromptSource,
    progress: Callable[[list[Cell], str], Iterable[Cell]] = lambda cells, title: cells,
) -> dict[str, Any]:
    """Every plan on every kind of prompts, in random order, again and again after a warm-up. Raises ValueError."""
    plans = [parse_plan(words) for words in settings.plans]
    bench = PlanBench(pair, settings, plans)
    sizes = [(t, b, plan) for t in settings.temperatures for b in settings.batch_sizes for plan in plans]
    cells = [Cell(kind, *size) for kind in KINDS for size in sizes]
    rates: dict[Cell, list[float]] = defaultdict(list)
    busy: dict[Cell, list[Timed]] = defaultdict(list)
    order = random.Random(settings.seed)
    try:
        for repeat in range(settings.repeats + 1):  # The first one warms up.
            drawn = {
                k: [draw(source, k, settings.prompt_tokens) for _ in range(settings.batch_sizes[-1])] for k in KINDS
            }
            for cell in progress(order.sample(cells, len(cells)), f"repeat {repeat} of {settings.repeats}"):
                rate, timed = bench.run(cell, drawn[cell.kind][: cell.batch_size], settings.new_tokens)
                if repeat and timed.num_steps:
                    rates[cell].append(rate)
                    busy[cell].append(timed)
    finally:
        bench.clock.end()
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "backend": bench.engine.backend,
        "machine": machine(pair.device),
        "settings": asdict(settings),
        "cells": [row for cell in cells if rates[cell] for row in [row_of(cell, rates[cell], busy[cell])]],
        "against_fixed": list(comparisons(cells, busy)),
    }


def row_of(cell: Cell, rates: list[float], busy: list[Timed]) -> dict[str, Any]:
    """One cell: tokens a second of whole runs, and of undisturbed steps of the full batch."""
    num_rows = cell.batch_size * sum(timed.num_steps for timed in busy)
    seconds = sum(timed.seconds for timed in busy)
    return {
        "prompts": cell.kind,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "plan": str(cell.plan),
        "tokens_per_s": asdict(spread(rates)),
        "full_batch_tokens_per_s": asdict(spread([timed.num_tokens / timed.seconds for timed in busy])),
        "tokens_per_row_and_step": sum(timed.num_tokens for timed in busy) / num_rows,
        "copied_per_row_and_step": sum(timed.num_proposed for timed in busy) / num_rows,
        "step_ms": 1e3 * seconds / sum(timed.num_steps for timed in busy),
        "search_share": sum(timed.search_s for timed in busy) / seconds,
    }


def comparisons(cells: Sequence[Cell], busy: dict[Cell, list[Timed]]) -> Iterator[dict[str, Any]]:
    """The best plan that copies against the best that does not, repeat by repeat, where both were measured."""
    rates = {cell: [timed.num_tokens / timed.seconds for timed in busy[cell]] for cell in cells if busy[cell]}
    for kind, temperature, batch_size in dict.fromkeys((c.kind, c.temperature, c.batch_size) for c in rates):
        here = {
            c: v for c, v in rates.items() if (c.kind, c.temperature, c.batch_size) == (kind, temperature, batch_size)
        }
        best: dict[bool, Cell] = {}
        for copies in (False, True):
            some = [cell for cell in here if cell.plan.copies == copies]
            if some:
                best[copies] = max(some, key=lambda cell: spread(here[cell]).median)
        if len(best) == 2 and len(here[best[True]]) == len(here[best[False]]):
            yield {
                "prompts": kind,
                "temperature": temperature,
                "batch_size": batch_size,
                "best_fixed": str(best[False].plan),
                "best_copying": str(best[True].plan),
                "ratio": asdict(ratio(here[best[True]], here[best[False]])),
            }


def show_plans(result: dict[str, Any], console: Console) -> None:
    """The comparison, and every cell under it."""
    table = Table(
        "prompts", "temperature", "rows", "plan", "tokens/s, all busy", "per row and step", "step ms", "search"
    )
    for row in result["cells"]:
        rate = row["full_batch_tokens_per_s"]
        figures = [f"{rate['median']:.0f}", f"{row['tokens_per_row_and_step']:.2f}", f"{row['step_ms']:.2f}"]
        where = [row["prompts"], f"{row['temperature']:g}", str(row["batch_size"]), row["plan"]]
        table.add_row(*where, *figures, f"{row['search_share']:.1%}")
    console.print(table)
    for row in result["against_fixed"]:
        value = row["ratio"]
        console.print(
            f"{row['prompts']}, temperature {row['temperature']:g}, {row['batch_size']} rows: {row['best_copying']} / "
            f"{row['best_fixed']}: {value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f})"
        )
