"""`speclen bench step`: what a step costs and yields at every batch size and length, beside transformers' generation."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from transformers.utils import logging as transformers_logging

from speclen.bench.engine.plans import PlanSettings, measure_plans, show_plans
from speclen.bench.engine.run import EngineBench, TimedStep
from speclen.bench.engine.transformers_baseline import TransformersBaseline
from speclen.bench.machine import machine
from speclen.bench.spread import Spread, ratio, spread
from speclen.console.errors import UserError
from speclen.console.flags import flags_from
from speclen.worker.backends.threads import set_threads
from speclen.worker.config import WorkerConfig
from speclen.worker.drafting.plan import Plan, parse_plan
from speclen.worker.models.loading import ModelPair, load_pair
from speclen.worker.profiling.prompts import PromptSource, held_out_texts, texts_from_file

ASSISTED_LENGTHS = (None, 3, 6)  # None: transformers' own schedule


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to time: an engine at a length, `generate`, or assisted generation at a length (None: its default)."""

    kind: str  # of an engine its backend, else "generate" or "assisted"
    batch_size: int
    length: int | None = None

    def __str__(self) -> str:
        length = "" if self.kind == "generate" else f", length {'default' if self.length is None else self.length}"
        return self.kind + length

    @property
    def is_engine(self) -> bool:
        return self.kind not in ("generate", "assisted")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured: backends and grids, and tokens per prompt and output."""

    backends: tuple[str, ...]

    batch_sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    repeats: int
    seed: int


@flags_from(WorkerConfig, "target", "draft", "device", "dtype")
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
    plans: str = typer.Option(
        "",
        help="Plans separated by semicolons, beside the fixed lengths: 'copy>=2 up to 8; copy>=3 up to 8, else draft 2'.",
    ),
    temperatures: str = typer.Option("0,0.7", help="Of --plans, separated by commas."),
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
        pair = load_pair(**models)
        set_threads(threads, pair)
        texts = texts_from_file(prompts) if prompts else held_out_texts()
        check(settings, pair)
        source = PromptSource(pair.tokenizer, texts, seed)
        if plans:
            result = measure_plans(pair, plan_settings(settings, plans, temperatures), source, progress)
        else:
            result = measure(pair, settings, source, baselines)
    except ValueError as error:
        raise UserError(str(error)) from error
    text = json.dumps(result, indent=2)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        print(text)
    elif plans:
        show_plans(result, Console(width=None if sys.stdout.isatty() else 120))
    else:
        show(result)


def plan_settings(settings: Settings, plans: str, temperatures: str) -> PlanSettings:
    """Those of --plans, fixed lengths first. Raises UserError naming the flag."""
    words = [str(Plan(length)) for length in settings.lengths]
    try:
        words += [str(parse_plan(text)) for text in plans.split(";")]
        warmth = tuple(sorted({float(text) for text in temperatures.split(",")}))
    except ValueError as error:
        raise UserError(f"--plans {plans!r}, --temperatures {temperatures!r}: {error}") from None
    if len(settings.backends) > 1 or not all(0 <= value <= 2 for value in warmth):
        raise UserError("--plans needs one --backend, and --temperatures from 0 to 2")
    return PlanSettings(
        settings.backends[0],
        tuple(dict.fromkeys(words)),
        settings.batch_sizes,
        warmth,
        settings.prompt_tokens,
        settings.new_tokens,
        settings.repeats,
        settings.seed,
    )


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

    transformers_logging.set_verbosity_error()  # generate warns about its own internal calls
    for work in progress(works, "warming up"):
        run(work, min(8, settings.new_tokens))
    order = random.Random(settings.seed)
    for repeat in range(settings.repeats):
        prompts = [source.draw(settings.prompt_tokens) for _ in range(settings.batch_sizes[-1])]
        for work in progress(order.sample(works, len(works)), f"repeat {repeat + 1} of {settings.repeats}"):
            seconds, timed = run(work, settings.new_tokens)
            rates[work].append(work.batch_size * settings.new_tokens / seconds)
            steps[work] += timed
    return summary(pair, settings, {name: one.engine.backend for name, one in engines.items()}, works, rates, steps)


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


def cell(work: Work, rates: list[float], steps: list[TimedStep]) -> dict[str, Any]:
    """Throughput over the repeats, and mean step time with its parts over all steps at full batch size."""
    row: dict[str, Any] = {
        "backend": work.kind,
        "batch_size": work.batch_size,
        "speculation_length": work.length,
        "tokens_per_s": asdict(spread(rates)),
        "num_steps": len(steps),
    }
    if not steps:
        return row
    rows = sum(timed.result.batch_size for timed in steps)
    accepted = sum(j * count for timed in steps for j, count in enumerate(timed.result.accepted_histogram))
    row["tokens_per_step"] = 1 + accepted / rows
    row["step_ms"] = 1e3 * mean(steps, lambda timed: timed.result.latency_s)
    # What a server gives that replaces finished rows; tokens_per_s above also has the tail in which rows wait for the
    # slowest one of a fixed set of prompts.
    row["full_batch_tokens_per_s"] = 1e3 * work.batch_size * row["tokens_per_step"] / row["step_ms"]
    if steps[0].draft_s is not None:
        row["draft_ms"] = 1e3 * mean(steps, lambda timed: timed.draft_s or 0.0)
        row["verify_ms"] = 1e3 * mean(steps, lambda timed: timed.verify_s or 0.0)
        row["other_ms"] = row["step_ms"] - row["draft_ms"] - row["verify_ms"]
        row["other_share"] = row["other_ms"] / row["step_ms"]
    return row


def mean(steps: list[TimedStep], value: Callable[[TimedStep], float]) -> float:
    return sum(value(timed) for timed in steps) / len(steps)


def ratios(rates: dict[Work, list[float]]) -> Iterator[tuple[str, Spread]]:
    """What the aims are stated in: against generate and assisted generation, against length 0, and between backends."""
    for batch_size in sorted({work.batch_size for work in rates}):
        best: dict[str, list[float]] = {}
        for backend in dict.fromkeys(work.kind for work in rates if work.is_engine):
            ours = {w.length: v for w, v in rates.items() if (w.kind, w.batch_size) == (backend, batch_size)}
            best[backend] = yield from ratios_of(backend, batch_size, ours, rates)
        first, *others = best
        for other in others:
            yield f"best length, {other} / {first}, batch {batch_size}", ratio(best[other], best[first])


def ratios_of(
    backend: str, batch_size: int, ours: dict[int | None, list[float]], rates: dict[Work, list[float]]
) -> Generator[tuple[str, Spread], None, list[float]]:
    """Ratios of one engine at one batch size. ours: tokens per second by length. Returns those of the best length."""
    best = max(ours, key=lambda length: spread(ours[length]).median)
    if generated := rates.get(Work("generate", batch_size)):
        yield f"{backend}, length 0 / generate, batch {batch_size}", ratio(ours[0], generated)
    if best:
        yield f"{backend}, best length {best} / length 0, batch {batch_size}", ratio(ours[best], ours[0])
    assisted = [v for work, v in rates.items() if work.kind == "assisted" and work.batch_size == batch_size]
    if assisted:
        fastest = max(assisted, key=lambda values: spread(values).median)
        yield (
            f"{backend}, best length {best} / best assisted generation, batch {batch_size}",
            ratio(ours[best], fastest),
        )
    return ours[best]


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


def format_rate(row: dict[str, Any]) -> list[str]:
    rate = row["tokens_per_s"]
    return [f"{rate[key]:.0f}" for key in ("median", "low", "high")]


def format_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
