"""`speclen bench step`: cost and yield of a step at every batch size and length, beside transformers' generation."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from transformers.utils import logging as transformers_logging

from speclen.bench.engine.bandwidth import read_bytes_per_s
from speclen.bench.engine.cells import Work, cell, memory, ratios
from speclen.bench.engine.run import EngineBench, TimedStep
from speclen.bench.engine.transformers_baseline import TransformersBaseline
from speclen.bench.machine import machine
from speclen.bench.spread import spread
from speclen.cli.support.errors import UserError
from speclen.cli.support.flags import flags_from
from speclen.worker.backends.threads import set_threads
from speclen.worker.config import WorkerConfig
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.models.naming import draft_of
from speclen.worker.profiling.prompts import PromptSource, held_out_texts, texts_from_file

ASSISTED_LENGTHS = (None, 3, 6)  # None: transformers' own schedule


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


@flags_from(WorkerConfig, "target", "draft", "device", "dtype", "weights")
def step(
    backend: str = typer.Option("auto", help="auto, torch or openvino, or several, separated by commas: side by side."),
    batch_sizes: str = typer.Option("1,4,16", help="Batch sizes, separated by commas."),
    lengths: str = typer.Option("0,2,4,6", help="Speculation lengths, separated by commas; 0 is always measured."),
    prompt_tokens: int = typer.Option(64, min=1, help="Tokens per prompt."),
    new_tokens: int = typer.Option(64, min=2, help="Tokens to generate per prompt."),
    repeats: int = typer.Option(5, min=1, help="How often everything is measured, in random order each time."),
    threads: int = typer.Option(0, min=0, help="torch threads on CPU; 0: as many as a worker uses."),
    prompts: Path | None = typer.Option(None, help="File of prompts; default: held-out files of Python's library."),
    seed: int = typer.Option(0, help="Of the prompts and of the order."),
    baselines: bool = typer.Option(True, help="Also time transformers' generate and assisted generation."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    out: Path | None = typer.Option(None, help="Also write the JSON to this file."),
    **models: str,
) -> None:
    """Measure step times, tokens per step, and throughput beside transformers on the same weights.

    Example: speclen bench step --target bundled:target-60m --batch-sizes 1,8 --lengths 0,3,6
    """
    settings = Settings(
        tuple(backend.split(",")),
        numbers("--batch-sizes", batch_sizes, 1, 4096),
        tuple(sorted({0, *numbers("--lengths", lengths, 0, 64)})),
        prompt_tokens,
        new_tokens,
        repeats,
        seed,
    )
    try:
        pair = load_pair(**(models | {"draft": draft_of(models["target"], models["draft"])}))
        set_threads(threads, pair)
        check(settings, pair)
        source = PromptSource(pair.tokenizer, texts_from_file(prompts) if prompts else held_out_texts(), seed)
        result = measure(pair, settings, source, baselines)
    except ValueError as error:
        raise UserError(str(error)) from error
    present(result, as_json, out)


def present(result: dict[str, Any], as_json: bool, out: Path | None) -> None:
    """Print the result, and write it to the file if there is one."""
    text = json.dumps(result, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        show(result)


def numbers(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Ascending whole numbers of a comma-separated list. Raises UserError naming the flag."""
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{flag} {text!r} is not a list of whole numbers such as 1,4,16") from None
    if values[0] < least or values[-1] > most:
        raise UserError(f"{flag} {text!r} must lie between {least} and {most}")
    return tuple(values)


def check(settings: Settings, pair: ModelPair) -> None:
    if settings.lengths[-1] and pair.draft is None:
        raise UserError("lengths over 0 need a draft: give --draft, or --lengths 0")
    needed = settings.prompt_tokens + settings.new_tokens
    if needed > pair.max_context_length:
        raise UserError(
            f"--prompt-tokens and --new-tokens make {needed} tokens, but the models hold {pair.max_context_length}"
        )


def measure(pair: ModelPair, settings: Settings, source: PromptSource, baselines: bool) -> dict[str, Any]:
    """Run everything `repeats` times in random order after a warm-up, and summarise."""
    baseline = TransformersBaseline(pair) if baselines else None
    engines = {
        backend: EngineBench(pair, settings.batch_sizes[-1], settings.lengths[-1], backend=backend)
        for backend in settings.backends
    }
    works = list(all_works(settings, baseline is not None and baseline.draft is not None, baseline is not None))
    rates: dict[Work, list[float]] = defaultdict(list)
    steps: dict[Work, list[TimedStep]] = defaultdict(list)
    prompts = [source.draw(settings.prompt_tokens) for _ in range(settings.batch_sizes[-1])]

    def run(work: Work, new_tokens: int) -> tuple[float, list[TimedStep]]:
        batch = prompts[: work.batch_size]
        if work.kind in engines:
            assert work.length is not None
            done = engines[work.kind].run(batch, new_tokens, work.length)
            return done.seconds, done.steps
        assert baseline is not None
        if work.kind == "generate":
            return baseline.generate(batch, new_tokens), []
        return baseline.assisted(batch, new_tokens, work.length), []

    bandwidths = []
    transformers_logging.set_verbosity_error()  # generate warns about its own internal calls
    for work in progress(works, "warming up"):
        run(work, min(8, settings.new_tokens))
    order = random.Random(settings.seed)
    for repeat in range(settings.repeats):
        prompts = [source.draw(settings.prompt_tokens) for _ in range(settings.batch_sizes[-1])]
        if pair.device.type == "cpu":
            bandwidths.append(read_bytes_per_s())
        for work in progress(order.sample(works, len(works)), f"repeat {repeat + 1} of {settings.repeats}"):
            seconds, timed = run(work, settings.new_tokens)
            rates[work].append(work.batch_size * settings.new_tokens / seconds)
            steps[work] += timed
    result = summary(pair, settings, {name: one.engine.backend for name, one in engines.items()}, works, rates, steps)
    return result | ({"memory": memory(pair.target, bandwidths, result["cells"])} if bandwidths else {})


def all_works(settings: Settings, assisted: bool, generate: bool) -> Iterator[Work]:
    for batch_size in settings.batch_sizes:
        for length in settings.lengths:
            yield from (Work(backend, batch_size, length) for backend in settings.backends)
        if generate:
            yield Work("generate", batch_size)
    if assisted and 1 in settings.batch_sizes:
        yield from (Work("assisted", 1, length) for length in ASSISTED_LENGTHS)


def progress(works: list[Any], title: str) -> Iterator[Any]:
    yield from track(works, title, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def summary(
    pair: ModelPair,
    settings: Settings,
    versions: dict[str, str],
    works: list[Work],
    rates: dict[Work, list[float]],
    steps: dict[Work, list[TimedStep]],
) -> dict[str, Any]:
    return {
        "target": pair.target_name,
        "draft": pair.draft_name,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "weights": pair.weights,
        "machine": machine(pair.device),
        "settings": asdict(settings),
        "backends": versions,
        "cells": [cell(work, rates[work], steps[work]) for work in works if work.is_engine],
        "baselines": [
            {"what": str(work), "batch_size": work.batch_size, "tokens_per_s": asdict(spread(rates[work]))}
            for work in works
            if not work.is_engine
        ],
        "ratios": [{"what": what, **asdict(value)} for what, value in ratios({work: rates[work] for work in works})],
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{result['target']} with {result['draft'] or 'no draft'}, {result['dtype']}, {result['machine']['device']}, "
        f"{result['machine']['torch_threads']} threads; tokens/s: median of whole runs; all busy: without tails"
    )
    columns = ["tokens/s", "least", "most", "all busy", "per step", "step ms", "draft", "verify", "other"]
    table = Table("", "batch", "length", *(Column(name, justify="right") for name in columns))
    for row in result["cells"]:
        tokens = f"{row['tokens_per_step']:.2f}" if "tokens_per_step" in row else "-"
        parts = [format_ms(row.get(key)) for key in ("step_ms", "draft_ms", "verify_ms", "other_ms")]
        full = f"{row['full_batch_tokens_per_s']:.0f}" if "full_batch_tokens_per_s" in row else "-"
        table.add_row(
            row["backend"],
            str(row["batch_size"]),
            str(row["speculation_length"]),
            *format_rate(row),
            full,
            tokens,
            *parts,
        )
    for row in result["baselines"]:
        what, _, length = row["what"].partition(", length ")
        table.add_row(what, str(row["batch_size"]), length, *format_rate(row))
    console.print(table)
    for row in result["ratios"]:
        console.print(f"{row['what']}: {row['median']:.2f} ({row['low']:.2f} to {row['high']:.2f})")
    if found := result.get("memory"):
        over = ", ".join(f"{backend} {share:.2f}" for backend, share in found["pass_over_least"].items())
        console.print(
            f"a pass reads {found['weight_mb_per_pass']:.0f} MB of the target's weights, memory gives "
            f"{found['read_gb_per_s']['median']:.1f} GB/s: {found['least_pass_ms']:.2f} ms at least; "
            f"a pass over one row takes that times {over or '-'}"
        )


def format_rate(row: dict[str, Any]) -> list[str]:
    rate = row["tokens_per_s"]
    return [f"{rate[key]:.0f}" for key in ("median", "low", "high")]


def format_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
