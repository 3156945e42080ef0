"""`speclen profile run`: measure, with progress, interrupt and resume, and hand the result on."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from speclen.bench.machine import machine, provenance
from speclen.bench.profile.document import PARTIAL_FORMAT, ProfileDocument, from_result, write_document
from speclen.cli.support.errors import UserError, say
from speclen.records import ContextKey
from speclen.worker.engine.config import EngineConfig
from speclen.worker.engine.preparation import prepare
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.profiler import Profiler
from speclen.worker.profiling.prompts import PromptSource
from speclen.worker.profiling.samples import ProfileSamples
from speclen.worker.profiling.settings import ProfileProgress, ProfileSettings
from speclen.worker.reporting.identity import context_key

SAVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Partial:
    """File of an unfinished profile. The name holds everything that must be equal to continue it."""

    path: Path

    def load(self) -> ProfileSamples:
        """Samples measured before; none when there is no file or it cannot be read."""
        try:
            content = json.loads(self.path.read_text("utf-8"))
            if content["format"] != PARTIAL_FORMAT:
                return ProfileSamples()
            return ProfileSamples.from_json(content["samples"])
        except (OSError, ValueError, KeyError, TypeError):
            return ProfileSamples()

    def save(self, samples: ProfileSamples) -> None:
        write_document(self.path, {"format": PARTIAL_FORMAT, "samples": samples.to_json()})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def core_context(pair: ModelPair, backend: str = "auto") -> ContextKey:
    """The context of an engine in this process, as the estimator names it. Raises ModelError."""
    key = context_key(pair, prepare(pair, EngineConfig(max_batch_size=2, backend=backend)).backend)
    return ContextKey(key.target, key.draft, key.device, key.dtype, key.engine_fingerprint)


def file_stem(context: ContextKey) -> str:
    """Readable and distinct: models, dtype, and a digest of the whole context."""
    digest = hashlib.sha256(json.dumps(context._asdict()).encode()).hexdigest()[:8]
    return re.sub(r"[^\w.-]+", "-", f"{context.target}_{context.draft}_{context.dtype}_{digest}")


def partial_of(folder: Path, context: ContextKey, settings: ProfileSettings, texts: list[str]) -> Partial:
    measured = asdict(settings) | {"budget_s": None}  # going on with more time is the same profile
    digest_of_texts = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    # One commit stands in the profile, so another one's steps are not gone on with.
    same = json.dumps([context._asdict(), measured, digest_of_texts, provenance()["commit"]])
    digest = hashlib.sha256(same.encode()).hexdigest()[:12]
    return Partial(folder / f"{digest}.partial.json")


def measure(
    pair: ModelPair,
    settings: ProfileSettings,
    texts: list[str],
    folder: Path,
    fresh: bool,
    source: str,
    keep: Callable[[ProfileDocument], None],
) -> ProfileDocument:
    """Measure until done, going on with an interrupted profile of the same settings unless `fresh`.

    keep: writes the profile; what it raises loses nothing, since the same command goes on from there. Ctrl-C saves what
    there is and ends with code 130. Raises UserError.
    """
    context = core_context(pair, settings.backend)
    partial = partial_of(folder, context, settings, texts)
    samples = ProfileSamples() if fresh else partial.load()
    if samples.num_rounds:
        say(f"going on with the profile that was interrupted after {samples.elapsed_s:.0f} s; --fresh starts anew")
    # The same prompts again after an interruption would count the same rows twice.
    prompts = PromptSource(pair.tokenizer, texts, settings.seed + samples.num_rounds)
    try:
        with (
            progress_bar(settings, partial, samples) as on_progress,
            Profiler(pair, settings, prompts, samples, on_progress) as profiler,
        ):
            profiler.run()
    except KeyboardInterrupt:
        partial.save(samples)
        say(f"interrupted after {samples.elapsed_s:.0f} s; the same command goes on from there")
        raise typer.Exit(130) from None
    except MemoryError as error:
        raise UserError(f"not even one row fits in memory: {error}") from error
    result = samples.result()
    if not result.cells:
        raise UserError(f"nothing was measured in {settings.budget_s:.0f} s: give more time with --budget-s")
    partial.save(samples)
    say_what_is_missing(settings, samples, len(result.cells))
    details = {"machine": machine(pair.device), "settings": asdict(settings), **provenance()}
    document = from_result(context, result, source, details)
    keep(document)
    partial.remove()
    return document


def say_what_is_missing(settings: ProfileSettings, samples: ProfileSamples, num_cells: int) -> None:
    """Name batch sizes and cells that are not part of the profile."""
    if samples.largest_batch_size is not None:
        say(f"batch sizes over {samples.largest_batch_size} do not fit in memory and were left out")
    elif missing := len(settings.batch_sizes) * len(settings.lengths) - num_cells:
        say(f"{missing} cells were not reached in {settings.budget_s:.0f} s and are not part of the profile")


@contextmanager
def progress_bar(settings: ProfileSettings, partial: Partial, samples: ProfileSamples) -> Any:
    """A bar on stderr with the time left at most; also saves what was measured every few seconds."""
    bar = Progress(
        TextColumn("profiling"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("profile", total=settings.budget_s, state="")
        yield reporter(bar, task, partial, samples)


def reporter(
    bar: Progress, task: TaskID, partial: Partial, samples: ProfileSamples
) -> Callable[[ProfileProgress], None]:
    saved_at = 0.0

    def report(progress: ProfileProgress) -> None:
        nonlocal saved_at
        state = f"at most {progress.left_s:.0f} s left, {progress.num_tight} of {progress.num_cells} cells certain"
        bar.update(task, completed=progress.elapsed_s, state=state)
        if progress.elapsed_s - saved_at >= SAVE_EVERY_S:
            saved_at = samples.elapsed_s = progress.elapsed_s
            partial.save(samples)

    return report
