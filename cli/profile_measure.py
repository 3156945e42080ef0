"""The measurement of `speclen profile run`."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from datetime import UTC, datetime

import typer

from speclen.cli.support.machine import machine, provenance
from speclen.cli.support.output import LiveLine, UserError, say
from speclen.records import ContextKey
from speclen.worker.engine.preparation import EngineConfig, prepare
from speclen.worker.frontend.worker_server import context_key
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.file import ProfileDocument
from speclen.worker.profiling.profiler import Profiler, ProfileSamples, ProfileSettings
from speclen.worker.profiling.prompts import PromptSource


def core_context(pair: ModelPair, backend: str = "auto", check_models: bool = True) -> ContextKey:
    """The context that an engine in this process would report. Raises ModelError."""
    config = EngineConfig(max_batch_size=2, backend=backend, check_models=check_models)
    key = context_key(pair, prepare(pair, config).backend)
    return ContextKey(key.target, key.draft, key.device, key.dtype, key.engine_fingerprint)


def file_stem(context: ContextKey) -> str:
    """A readable, unique file name: models, dtype, and a digest of the context."""
    digest = hashlib.sha256(json.dumps(context._asdict()).encode()).hexdigest()[:8]
    return re.sub(r"[^\w.-]+", "-", f"{context.target}_{context.draft}_{context.dtype}_{digest}")


def measure(pair: ModelPair, settings: ProfileSettings, texts: list[str], source: str) -> ProfileDocument:
    """Measure until the budget is spent. Ctrl-C discards everything and exits with code 130. Raises UserError."""
    context = core_context(pair, settings.backend, settings.check_models)
    prompts = PromptSource(pair.tokenizer, texts, settings.seed)
    try:
        with LiveLine() as line:
            samples = Profiler(
                pair,
                settings,
                prompts,
                lambda elapsed_s: line.show("profiling", f": {settings.budget_s - elapsed_s:.0f} s left"),
            ).run()
    except KeyboardInterrupt:
        say("interrupted: no profile was made")
        raise typer.Exit(130) from None
    if not samples.steps:
        raise UserError(f"nothing was measured in {settings.budget_s:.0f} s: give more time with --budget-s")
    say_what_is_missing(settings, samples, len(samples.steps))
    measured = {"elapsed_s": round(samples.elapsed_s, 1), "largest_batch_size": samples.largest_batch_size}
    details = {"machine": machine(pair.device), "settings": asdict(settings), **provenance(), **measured}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return ProfileDocument(context, samples.result()._replace(source=source), now, details)


def say_what_is_missing(settings: ProfileSettings, samples: ProfileSamples, num_cells: int) -> None:
    """Report batch sizes and cells that are missing from the profile."""
    if samples.largest_batch_size is not None:
        say(f"batch sizes over {samples.largest_batch_size} do not fit in memory and were left out")
    elif missing := len(settings.batch_sizes) * len(settings.lengths) - num_cells:
        say(f"{missing} cells were not reached in {settings.budget_s:.0f} s and are not part of the profile")
