"""What a serving benchmark needs before its first run: settings that make sense, and a survey of the machine."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speclen.bench.comparison.report import provenance
from speclen.bench.serving.deployment import Contender, Deployment, WorkerSettings, parse_contenders
from speclen.bench.serving.load import Prompt
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.survey import Survey, capacity_cells, exhaustive_cells, load_survey, measure
from speclen.bench.serving.track_file import load_track
from speclen.bench.serving.tracks import SCENARIOS, scenario_of
from speclen.console.errors import UserError
from speclen.transport.settings import check_bounds, setting
from speclen.v1 import control_pb2 as pb
from speclen.worker.profiling.file import foreign_parts

# Nothing of a policy's is running while a survey measures: every request names its own length.
SURVEYOR = Contender("survey", "none", local=True)
SURVEY_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for, checked as far as possible before anything starts."""

    settings: WorkerSettings
    track: str = setting("time-varying", f"{', '.join(SCENARIOS)}; a saved track's file; or segments.")
    compare: str = setting("adaptive,none", "Policies, the one it is about first.")
    repeats: int = setting(3, "Runs of every policy, interleaved.", least=1)
    profile: Path | None = setting(None, "Offline profile for `profile`, and the seed of `adaptive`.")
    survey: Path | None = setting(None, "Survey to use; measured and written there when it does not exist.")
    cell_s: float = setting(4.0, "Seconds per cell of a survey.", least=0.2)
    duration_s: float | None = setting(None, "Seconds of the track; default: the track's own.")
    scale: float = setting(1.0, "Multiplies every load of the track.", least=0.01)
    seed: int = setting(0, "Draws arrivals, prompts and output lengths.", least=0)
    burners: int = setting(1, "Processes that take a core each, on a track that throttles.", least=1)

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def wants_oracle(self) -> bool:
        return any(name.strip().startswith("oracle") for name in self.compare.split(","))

    @property
    def replays(self) -> bool:
        return self.track not in SCENARIOS and Path(self.track).is_file()

    def contenders(self, oracle: Path | None) -> list[Contender]:
        """Cold tracks take the profile away from whoever learns, not from the paper's table."""
        found = parse_contenders(self.compare, self.settings.max_length, self.profile, oracle)
        scenario = SCENARIOS.get(self.track)
        if scenario is not None and scenario.cold:
            return [replace(c, profile=None, seeded=False) if c.learns else c for c in found]
        return found


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the survey found, and which worker it was."""

    survey: Survey
    survey_file: Path
    context: dict[str, str]


def prepare(plan: Plan) -> Prepared:
    """Check the plan, then measure what is not known yet. Raises ValueError or UserError with one sentence."""
    plan.contenders(Path())
    kind, scenario = first_kind(plan), None if plan.replays else scenario_of(plan.track)
    if scenario is None or not scenario.foreign_profile:
        return survey(plan, kind)
    if plan.profile is None:
        raise UserError(f"track {plan.track} needs --profile FILE, measured on another machine")
    prepared = survey(plan, kind)
    if not foreign_parts(plan.profile, pb.ContextKey(**prepared.context)):
        raise UserError(
            f"track {plan.track} needs another machine's profile, but {plan.profile} was measured on this one, with the "
            "same models, dtype and threads"
        )
    return prepared


def survey(plan: Plan, kind: str) -> Prepared:
    """The survey that the plan names, or a new one with prompts of that kind. Raises UserError."""
    settings = plan.settings
    limits = (settings.max_batch_size, settings.max_length)
    file = plan.survey or Path(f"speclen-survey-{settings.target.rpartition(':')[2].rpartition('/')[2]}.json")
    if plan.survey is not None and file.exists():
        known = load_survey(file)
        if plan.wants_oracle and not known.is_exhaustive(settings.max_length):
            raise UserError(f"the survey {file} lacks lengths that oracle needs: name another file to measure them")
        return Prepared(known, file, json.loads(file.read_text("utf-8"))["context"])
    cells = exhaustive_cells(*limits) if plan.wants_oracle else capacity_cells(*limits)
    with Deployment(SURVEYOR, settings) as deployment:
        info = deployment.model_info()
        context = {field.name: getattr(info.context, field.name) for field in info.context.DESCRIPTOR.fields}
        prompt = prompt_maker(plan, kind)
        say(f"survey of {len(cells)} cells, about {len(cells) * (plan.cell_s + 2) / 60:.0f} minutes")
        found = asyncio.run(measure(deployment.worker.address, cells, prompt, plan.cell_s, on_cell=show_cells))
    found.save(file, {"context": context, "cell_s": plan.cell_s, **provenance()})
    say(f"survey written to {file}: --survey {file} uses it again")
    return Prepared(found, file, context)


def first_kind(plan: Plan) -> str:
    """The kind of prompts that the track begins with. Raises ValueError when the track cannot be read."""
    if plan.replays:
        return load_track(Path(plan.track)).arrivals[0].kind
    return scenario_of(plan.track).segments[0].kind


def prompt_maker(plan: Plan, kind: str) -> Callable[[], Prompt]:
    """Prompts for a survey; the track's own are drawn from other seeds."""
    drawer = PromptDrawer(load_tokenizer(plan.settings.target))
    seeds = itertools.count(1_000_000)
    return lambda: drawer.draw(kind, SURVEY_PROMPT_TOKENS, next(seeds))


def load_tokenizer(target: str) -> Any:
    """The tokenizer of a model as the worker names it. Raises ValueError with one sentence."""
    from speclen.worker.models.loading import load_tokenizer as load  # here, since torch takes seconds to import

    return load(target)


def show_cells(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rsurvey: {done} of {total} visits", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done % 20 == 0 or done == total:
        say(f"survey: {done} of {total} visits")


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
