"""`speclen bench serve`: the same traffic for every policy, interleaved, and what that says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from speclen.bench.comparison.compare import Comparison, compare_runs, run_all
from speclen.bench.comparison.plan import Plan, Prepared, load_tokenizer, prepare, say
from speclen.bench.comparison.report import print_comparison, provenance, to_json, write_requests
from speclen.bench.serving import track_file
from speclen.bench.serving.deployment import Contender, Deployment, WorkerSettings
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.run_track import TrackRun, failed_run, run_track
from speclen.bench.serving.tracks import Track, make_track
from speclen.console.errors import UserError
from speclen.console.flags import flags_from
from speclen.transport.settings import settings_of
from speclen.worker.config import WorkerConfig

GOOD_ENOUGH = 2.0  # goodput: latency per token at most so many times that of one request alone without speculation
QUICK_DURATION_S, QUICK_CELL_S = 20.0, 1.5
START_AND_STOP_S = 20.0  # of controller and worker, about, for the estimate of how long it will take


@flags_from(Plan)
@flags_from(WorkerConfig, "draft", "device", "dtype", "backend", "max_length", "threads")
def serve(
    target: str = typer.Option("bundled:target-60m", help="Target model, as for a worker."),
    max_batch_size: int = typer.Option(16, min=1, help="Rows decoding in one step."),
    target_ms_per_token: float = typer.Option(0.0, min=0, help="Goodput's latency per token; 0: from the survey."),
    quick: bool = typer.Option(False, help="Seconds instead of minutes, to see that all works; figures are marked."),
    save_track: Path | None = typer.Option(None, help="Write the track, to be replayed."),
    out: Path | None = typer.Option(None, help="Write the comparison as JSON."),
    requests: Path | None = typer.Option(None, help="Write every request of every run, one JSON line each."),
    plot: Path | None = typer.Option(None, help="Draw latency, batch size and length over time (png, svg, pdf)."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON on stdout instead of tables."),
    **others: Any,
) -> None:
    """Serve one track with every policy in turn and compare latencies.

    Example: speclen bench serve --track time-varying --compare adaptive,none,fixed:2,fixed:4,oracle --repeats 3
    """
    try:
        plan = plan_of(target, max_batch_size, quick, others)
        session = Session(plan, prepare(plan))
        if save_track is not None:
            track_file.save_track(session.track, save_track)
        comparison = session.run(target_ms_per_token / 1e3 or None)
    except ValueError as error:
        raise UserError(str(error)) from error
    document = to_json(comparison, {**provenance(), "quick": quick, **session.facts()})
    write_all(comparison, document, out, requests, plot)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        print_comparison(comparison, Console())
        if quick:
            print("--quick: these figures show that everything works, and nothing else")


def plan_of(target: str, max_batch_size: int, quick: bool, others: dict[str, Any]) -> Plan:
    """The plan that the flags describe. Raises ValueError for a setting outside its bounds."""
    of_plan = {name: others.pop(name) for name in settings_of(Plan)}
    settings = WorkerSettings(target=target, max_batch_size=max_batch_size, **others)
    plan = Plan(settings, **of_plan)
    return replace(plan, cell_s=QUICK_CELL_S, duration_s=plan.duration_s or QUICK_DURATION_S) if quick else plan


class Session:
    """One comparison: track, prompts, and fresh processes for every run."""

    def __init__(self, plan: Plan, prepared: Prepared) -> None:
        self.plan = plan
        self.prepared = prepared
        self.contenders = plan.contenders(prepared.survey_file)
        self.track = self._track()
        self.prompts = PromptDrawer(load_tokenizer(plan.settings.target)).for_track(self.track.arrivals)

    def _track(self) -> Track:
        plan = self.plan
        if plan.replays:
            return track_file.load_track(Path(plan.track))
        capacity = self.prepared.survey.capacity_tokens_per_s
        return make_track(plan.track, capacity, plan.seed, plan.duration_s, plan.scale)

    @property
    def is_exhaustive(self) -> bool:
        """Whether the survey knows every length at every concurrency."""
        return self.prepared.survey.is_exhaustive(self.plan.settings.max_length)

    def run(self, target_s_per_token: float | None) -> Comparison:
        total = len(self.contenders) * self.plan.repeats
        say(
            f"{total} runs of {self.track.duration_s:.0f} s with {len(self.track.arrivals)} requests each, capacity "
            f"{self.track.capacity_tokens_per_s:.0f} tokens/s; "
            f"about {total * (self.track.duration_s + START_AND_STOP_S) / 60:.0f} minutes"
        )
        if self.is_exhaustive:
            say(self.prepared.survey.outlook())
        runs = run_all(self.contenders, self.plan.repeats, self.run_one)
        target = target_s_per_token or GOOD_ENOUGH * self.prepared.survey.plain_s_per_token
        return compare_runs(self.track, self.contenders, runs, target, self.plan.repeats)

    def run_one(self, contender: Contender, repeat: int) -> TrackRun:
        """A process that does not start is an error at first, and a run in which everything failed later on."""
        try:
            with Deployment(contender, self.plan.settings) as deployment:
                return asyncio.run(run_track(deployment, self.track, self.prompts, repeat, self.plan.burners))
        except UserError as error:
            if repeat == 0:
                raise
            return failed_run(contender.name, repeat, self.track, str(error))

    def facts(self) -> dict[str, Any]:
        """What the figures depend on."""
        import torch  # here, since it takes seconds

        from speclen.bench.machine import machine

        settings, survey = self.plan.settings, self.prepared.survey
        return {
            "machine": machine(torch.device("cuda" if "cuda" in self.prepared.context["device"] else "cpu")),
            "context": self.prepared.context,
            "worker": {name: getattr(settings, name) for name in settings.__slots__},
            "seed": self.plan.seed,
            "scale": self.plan.scale,
            "burners": self.plan.burners if self.track.throttle_at_s is not None else 0,
            "profile": None if self.plan.profile is None else self.plan.profile.name,
            "capacity_tokens_per_s": survey.capacity_tokens_per_s,
            "best_length": {str(size): survey.best_length(size) for size in survey.concurrencies},
            "best_single_length": survey.best_single_length if self.is_exhaustive else None,
            "table_gain": survey.table_gain if self.is_exhaustive else None,
        }


def write_all(
    comparison: Comparison, document: dict[str, Any], out: Path | None, requests: Path | None, plot: Path | None
) -> None:
    try:
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        if requests is not None:
            write_requests(comparison, requests)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from error
    if plot is not None:
        from speclen.bench.comparison.plot import plot as draw

        draw(comparison, plot)
