"""`speclen bench step`: time, acceptance and throughput of a step at every batch size and length."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product, starmap
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from speclen.bench.figures import Spread, figure, ratio, spread
from speclen.bench.generate import generate
from speclen.cli.support.flags import flags_from, ranges
from speclen.cli.support.machine import machine
from speclen.cli.support.output import UserError, user_errors, write_whole
from speclen.records import PLAIN, Arm, StepRecord
from speclen.worker.arms import FixedArm
from speclen.worker.backends.threads import set_threads
from speclen.worker.config import WorkerConfig
from speclen.worker.engine.engine import Engine, EngineConfig
from speclen.worker.engine.speculative import LaunchedStep
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.models.naming import draft_of
from speclen.worker.profiling.prompts import PromptSource, held_out_texts

Prompts = Sequence[tuple[int, ...]]
OF_STEPS = ("full_batch_tokens_per_s", "tokens_per_step", "step_ms", "host_ms")


@dataclass(frozen=True, slots=True)
class Settings:
    """Backends and grids to measure, and tokens per prompt and output."""

    backends: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    seed: int


class Work(NamedTuple):
    """One thing to time."""

    batch_size: int
    length: int
    backend: str


@flags_from(WorkerConfig, "target", "draft", "device", "dtype")
def step(
    backend: str = typer.Option("auto", help="auto, torch or openvino, or several, separated by commas: side by side."),
    batch_sizes: str = typer.Option("1,4,16", help="Batch sizes: a list with ranges, such as 1,2,4-8."),
    lengths: str = typer.Option("0,2,4,6", help="Speculation lengths, such as 2,4-8; 0 is always measured."),
    prompt_tokens: int = typer.Option(64, min=1, help="Tokens per prompt."),
    new_tokens: int = typer.Option(64, min=2, help="Tokens to generate per prompt."),
    repeats: int = typer.Option(5, min=1, help="How often everything is measured, in random order each time."),
    threads: int = typer.Option(0, min=0, help="torch threads on CPU; 0: as many as a worker uses."),
    seed: int = typer.Option(0, help="Seed of the prompts and of the order."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    out: Path | None = typer.Option(None, help="Also write the JSON to this file."),
    **models: str,
) -> None:
    """Measure step times, tokens per step and throughput of the engine alone.

    Example: speclen bench step --target bundled:target-60m --batch-sizes 1,8 --lengths 0,3,6
    """
    settings = Settings(
        tuple(backend.split(",")),
        ranges("--batch-sizes", batch_sizes, 1, 4096),
        tuple(sorted({0, *ranges("--lengths", lengths, 0, 64)})),
        prompt_tokens,
        new_tokens,
        repeats,
        seed,
    )
    with user_errors():
        pair = load_pair(**(models | {"draft": draft_of(models["target"], models["draft"])}))
        set_threads(threads, pair)
        check(settings, pair)
        source = PromptSource(pair.tokenizer, held_out_texts(), seed)
        result = measure(pair, settings, source)
    text = json.dumps(result, indent=2)
    if out is not None:
        write_whole(out, text)
    if as_json:
        print(text)
    else:
        show(result)


def check(settings: Settings, pair: ModelPair) -> None:
    if settings.lengths[-1] and pair.draft is None:
        raise UserError("lengths over 0 need a draft: give --draft, or --lengths 0")
    needed = settings.prompt_tokens + settings.new_tokens
    if needed > pair.max_context_length:
        raise UserError(
            f"--prompt-tokens and --new-tokens make {needed} tokens, over the models' {pair.max_context_length}: give less"
        )


def measure(pair: ModelPair, settings: Settings, source: PromptSource) -> dict[str, Any]:
    """Run everything `repeats` times in random order after a warm-up, and summarise."""
    limits = (settings.batch_sizes[-1], settings.lengths[-1])
    engines = {name: Engine(pair, EngineConfig(*limits, backend=name), FixedArm(PLAIN)) for name in settings.backends}
    host_times = {name: watch_host(engine) for name, engine in engines.items()}
    works = list(starmap(Work, product(settings.batch_sizes, settings.lengths, settings.backends)))
    hosts: dict[Work, list[float]] = defaultdict(list)
    rates: dict[Work, list[float]] = defaultdict(list)
    steps: dict[Work, list[StepRecord]] = defaultdict(list)
    order, stderr, quiet = random.Random(settings.seed), Console(stderr=True), not sys.stderr.isatty()
    for repeat in range(settings.repeats + 1):
        prompts = [source.draw(settings.prompt_tokens) for _ in range(settings.batch_sizes[-1])]
        title = f"repeat {repeat} of {settings.repeats}" if repeat else "warming up"
        for work in track(order.sample(works, len(works)), title, console=stderr, transient=True, disable=quiet):
            new_tokens = settings.new_tokens if repeat else min(8, settings.new_tokens)
            host_times[work.backend].clear()
            seconds, found = run(engines[work.backend], prompts[: work.batch_size], new_tokens, work.length)
            if repeat:
                hosts[work] += host_times[work.backend][1:]  # the first is since the run before
                rates[work].append(work.batch_size * new_tokens / seconds)
                steps[work] += found
    plain = {size: rates[Work(size, 0, settings.backends[0])] for size in settings.batch_sizes}
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "machine": machine(pair.device),
        "settings": asdict(settings),
        "backends": {name: one.backend for name, one in engines.items()},
        "cells": [cell(work, rates[work], plain[work.batch_size], steps[work], hosts[work]) for work in works],
    }


def run(engine: Engine, prompts: Prompts, new_tokens: int, length: int) -> tuple[float, list[StepRecord]]:
    """Seconds of the whole batch, and its steps at full batch size that no flag excludes."""
    arm, steps = Arm(length), list[StepRecord]()
    engine.use_chooser(FixedArm(arm))
    start = time.perf_counter()
    generate(engine, prompts, [new_tokens] * len(prompts), steps.append)
    seconds = time.perf_counter() - start
    # At the end of a sequence a step may use less than the length asked for: it says nothing about that length.
    return seconds, [one for one in steps if not one.flags and (one.batch_size, one.arm) == (len(prompts), arm)]


def watch_host(engine: Engine) -> list[float]:
    """Host times, appended while the engine runs: seconds between a step's result and the next pass of a model."""
    found, results = list[float](), list[float]()

    def before(run: Callable[..., Any]) -> Callable[..., Any]:
        def first(*parts: Any) -> Any:
            if results:
                found.append(time.perf_counter() - results.pop())
            return run(*parts)

        return first

    def after(read: Callable[..., None]) -> Callable[..., None]:
        def noted(step: LaunchedStep) -> None:
            read(step)
            results[:] = [time.perf_counter()]

        return noted

    engine.runner.read = after(engine.runner.read)  # type: ignore[method-assign]
    for model in (engine.target, engine.draft):
        for name in {"forward", "host_logits"} & set(dir(model)):
            setattr(model, name, before(getattr(model, name)))
    return found


def cell(
    work: Work, rates: list[float], plain: list[float], steps: list[StepRecord], host_times: list[float]
) -> dict[str, Any]:
    """Throughput over the repeats, and mean step time over all steps at full batch size.

    plain: tokens per second of the first backend at length 0, repeat by repeat. host_times: as by `watch_host`.
    """
    row: dict[str, Any] = {
        "kind": work.backend,
        "batch_size": work.batch_size,
        "speculation_length": work.length,
        "tokens_per_s": asdict(spread(rates)),
        "over_length_0": asdict(ratio(rates, plain)),
        "num_steps": len(steps),
    }
    if not steps:
        return row
    sequences = sum(record.batch_size for record in steps)
    accepted = sum(j * count for record in steps for j, count in enumerate(record.accepted_histogram))
    row["tokens_per_step"] = 1 + accepted / sequences
    row["step_ms"] = 1e3 * fmean(record.latency_s for record in steps)
    row["host_ms"] = 1e3 * median(host_times)
    # A server's throughput, which replaces finished sequences; tokens_per_s also has the tail of a fixed set of prompts.
    row["full_batch_tokens_per_s"] = 1e3 * work.batch_size * row["tokens_per_step"] / row["step_ms"]
    return row


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{result['target']} with {result['draft'] or 'no draft'}, {result['dtype']}, {result['machine']['device']}, "
        f"{result['machine']['torch_threads']} threads; tokens/s: median of whole runs; all busy: without tails; "
        "host ms: from a step's result to the next pass"
    )
    columns = ["tokens/s", "over 0", "all busy", "per step", "step ms", "host ms"]
    table = Table("", "batch", "length", *(Column(name, justify="right") for name in columns))
    for row in result["cells"]:
        where = (row["kind"], str(row["batch_size"]), str(row["speculation_length"]))
        rates = (str(Spread(**row["tokens_per_s"])), figure(row["over_length_0"]["median"]))
        values = (figure(row[name]) if name in row else "-" for name in OF_STEPS)
        table.add_row(*where, *rates, *values)
    console.print(table)
