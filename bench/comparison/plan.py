"""What a serving benchmark needs before its first round: settings that make sense, and a survey of the machine."""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from speclen.bench.machine import machine, provenance
from speclen.bench.serving.deployment import WorkerSettings
from speclen.bench.serving.load import Yield, closed_loop, explain, make_request
from speclen.bench.serving.policies import Policy, parse_policies
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.recipes import ALIASES, SCENARIOS, TrackRecipe, scenario_of
from speclen.bench.serving.survey import (
    FIRST_VISITS,
    Survey,
    capacity_cells,
    exhaustive_cells,
    load_survey,
    measure,
)
from speclen.bench.serving.tracks import MEAN_OUTPUT_TOKENS, draw_requests
from speclen.bench.serving.warm import WarmWorker
from speclen.console.errors import UserError, say
from speclen.records import PLAIN, Arm, parse_arm
from speclen.transport.settings import check_bounds, setting
from speclen.v1 import generation_pb2 as pb
from speclen.v1.control_pb2 import ContextKey
from speclen.worker.models.devices import processor_model

MOST_ROUNDS = 1000
CAPACITY_VISIT_S, AGREE, MOST_CAPACITY_VISITS = 8.0, 1.05, 6
DRAWN_TOGETHER = 64  # requests of a mix, among which conversations go on


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for, checked as far as possible before anything starts."""

    settings: WorkerSettings
    track: str = setting("mixed", f"{', '.join([*SCENARIOS, *ALIASES])}; or segments.")
    compare: str = setting("adaptive,none,fixed:3", "Policies, the one it is about first.")
    minutes: float = setting(15.0, "Time for the rounds, after the survey.", least=0.05)
    repeats: int = setting(0, "Rounds at most, one more not counted; 0: as many as there is time for.", least=0)
    resolution: float = setting(0.03, "Stop when every interval is so narrow: 0.03 is ±3%.", least=0.001, most=1)
    learn_s: float = setting(120.0, "Seconds of the track that `adaptive` serves and learns from beforehand.", least=0)
    profile: Path | None = setting(None, "Offline profile: seed of `adaptive`, and source of the tables.")
    survey: Path | None = setting(None, "Survey to use; measured and written there when it does not exist.")
    cell_s: float = setting(6.0, "Seconds per cell of a survey, without speculation.", least=0.2)
    block_s: float | None = setting(None, "Seconds of a block; default: the track's own.")
    scale: float = setting(1.0, "Multiplies every load of the track.", least=0.01)
    capacity: float | None = setting(None, "Tokens per second that loads are shares of; default: measured.")
    seed: int = setting(0, "Draws arrivals, prompts, output lengths and the sampling seeds.", least=0)
    burners: int = setting(1, "Processes that take a core each, on a track that throttles.", least=1)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.capacity is not None and not 0.0 < self.capacity < math.inf:
            raise ValueError(f"--capacity is {self.capacity}; it must be a number of tokens per second above 0")

    @property
    def recipe(self) -> TrackRecipe:
        """Raises ValueError for a track that cannot be read."""
        return scenario_of(self.track)

    @property
    def names(self) -> list[str]:
        """Of the policies. Raises UserError naming one that is unknown, or that the track is not for."""
        names = parse_policies(self.compare, self.settings.max_length)
        if "cold" in names and not self.recipe.cold:
            raise UserError(f"--compare cold is for the track cold, not {self.track}")
        if self.recipe.wrong_profile and self.profile is None:
            raise UserError(f"track {self.track} needs --profile FILE, measured on greedy text: `speclen profile run`")
        return names

    def facts(self) -> dict[str, Any]:
        """What figures depend on and is known before anything starts."""
        return {
            "policies": self.names,
            "worker": {name: getattr(self.settings, name) for name in self.settings.__slots__},
            "profile": None if self.profile is None else self.profile.name,
            "profile_sha256": None if self.profile is None else digest_of(self.profile),
            "seed": self.seed,
            "scale": self.scale,
            "learn_s": self.learn_s,
            "processor": processor_model(),
        }

    @property
    def wants_oracle(self) -> bool:
        return "oracle" in self.names


def capacity_and_oracle(plan: Plan, worker: WarmWorker) -> Survey:
    """The survey that the plan names, or a new one with the track's requests. Raises UserError or ValueError."""
    settings = plan.settings
    if plan.survey is not None and plan.survey.exists():
        known = load_survey(plan.survey)
        if plan.wants_oracle and not known.is_exhaustive(settings.max_length):
            raise UserError(
                f"the survey {plan.survey} lacks lengths that oracle needs: name another file to measure them"
            )
        return known
    limits = (settings.max_batch_size, settings.max_length)
    cells = exhaustive_cells(*limits) if plan.wants_oracle else capacity_cells(*limits)
    say(
        f"survey of {len(cells)} cells, {len(cells) * plan.cell_s / 60:.0f} to {len(cells) * plan.cell_s / 20:.0f} minutes"
    )
    found = measure(cells, Visitor(plan, worker), on_cell=show_cells)
    found.track = plan.track
    if plan.survey is not None:
        context = worker.context()
        facts = {field.name: getattr(context, field.name) for field in context.DESCRIPTOR.fields}
        place = {"machine": machine_of(context), "context": facts}
        found.save(plan.survey, {**place, "cell_s": plan.cell_s, **provenance()})
        say(f"survey written to {plan.survey}: --survey {plan.survey} uses it again")
    return found


def machine_of(context: ContextKey) -> dict[str, Any]:
    """What the worker of this context runs on."""
    import torch  # here, since it takes seconds

    return machine(torch.device("cuda" if "cuda" in context.device else "cpu"))


def capacity_now(plan: Plan, worker: WarmWorker, survey: Survey) -> list[float]:
    """Tokens per second with every row busy with the track's requests, at the length that the survey found fastest, on the
    machine as it is today, which is a fifth slower on some days. By visit; the last two agree, and are what counts.

    Each visit serves the same requests: until they agree, shapes are new, or something else runs.
    """
    visitor, (concurrency, words) = Visitor(plan, worker), survey.capacity_cell
    seconds = min(CAPACITY_VISIT_S, 2 * plan.cell_s)
    rates: list[float] = []
    while len(rates) < MOST_CAPACITY_VISITS and not (len(rates) > 1 and agree(*rates[-2:])):
        rates.append(visitor.serve_for(seconds, concurrency, parse_arm(words)).tokens_per_s)
    if not agree(*rates[-2:]):
        say(
            f"capacity: {len(rates)} visits, and the last two differ by more than {AGREE - 1:.0%}: is the machine quiet?"
        )
    beside = f", {capacity_of(rates) / survey.capacity_tokens_per_s:.2f} times the survey's"
    say(f"capacity: {capacity_of(rates):.0f} tokens/s{beside if survey.track == plan.track else ''}")
    return rates


def agree(first: float, second: float) -> bool:
    return max(first, second) <= AGREE * min(first, second)


def capacity_of(rates: list[float]) -> float:
    return sum(rates[-2:]) / len(rates[-2:])


class Visitor:
    """Serves so many requests at a time by an arm, the same ones for every arm: `measure` calls it.

    There are as many of them as keep the worker busy for the plan's seconds without speculation, once it has served so many
    at a time: shapes that are new take longer. The first of them, one for each at a time, are not counted.
    """

    def __init__(self, plan: Plan, worker: WarmWorker) -> None:
        self._plan, self._worker = plan, worker
        self._visit_s = plan.cell_s / FIRST_VISITS
        self._drawer = PromptDrawer(load_tokenizer(plan.settings.target))
        self._num_requests: dict[int, int] = {}  # by requests at a time
        self._drawn: dict[tuple[int, int], list[pb.GenerateRequest]] = {}  # by round and requests at a time

    def __call__(self, number: int, concurrency: int, arm: Arm) -> Yield:
        """One visit. Raises ValueError with a sentence."""
        if concurrency not in self._num_requests:
            for _ in range(2):  # the first is not counted
                found = self.serve_for(self._visit_s, concurrency, PLAIN)
            self._num_requests[concurrency] = 2 * concurrency + math.ceil(found.tokens / MEAN_OUTPUT_TOKENS)
        place = number, concurrency
        if place not in self._drawn:
            of_round = self._requests(*place)
            self._drawn[place] = list(itertools.islice(of_round, self._num_requests[concurrency]))
        return self._serve(concurrency, arm, self._drawn[place])

    def serve_for(self, seconds: float, concurrency: int, arm: Arm) -> Yield:
        """Always the same requests, for so many seconds. Raises ValueError with a sentence."""
        return self._serve(concurrency, arm, self._requests(MOST_ROUNDS, concurrency), seconds)

    def _serve(
        self, concurrency: int, arm: Arm, requests: Iterable[pb.GenerateRequest], limit_s: float = math.inf
    ) -> Yield:
        self._worker.open(Policy("survey", (arm,) * self._plan.settings.max_batch_size))
        self._worker.use("survey")
        try:
            loop = closed_loop(self._worker.address, concurrency, requests, limit_s, num_settling=concurrency)
            return self._worker.runner.run(loop)
        except grpc.RpcError as error:
            reason = explain(error, self._worker.address)
            raise ValueError(f"the survey failed with {concurrency} requests at a time: {reason}") from error

    def _requests(self, number: int, concurrency: int) -> Iterator[pb.GenerateRequest]:
        """Requests of all kinds that the track has, of this round and so many at a time."""
        rng, mixes = np.random.default_rng([self._plan.seed, 1_000_000, number, concurrency]), self._plan.recipe.mixes
        while True:
            drawn = [draw_requests(rng, np.zeros(DRAWN_TOGETHER), mix) for mix in mixes]
            for each in itertools.chain.from_iterable(zip(*drawn, strict=True)):
                prompt = self._drawer.draw(each.kind, each.prompt_tokens, each.prompt_seed)
                yield make_request(prompt, each.output_tokens, each.temperature, each.sampling_seed)


def digest_of(path: Path) -> str:
    """Of a profile, whose name says little. Raises UserError naming the file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"cannot read the profile {path}: {error.strerror}") from error


def load_tokenizer(target: str) -> Any:
    """The tokenizer of a model as the worker names it. Raises ValueError with one sentence."""
    from speclen.worker.models.loading import load_tokenizer as load  # here, since torch takes seconds to import

    return load(target)


def show_cells(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rsurvey: {done} of {total} visits", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done % 20 == 0 or done == total:
        say(f"survey: {done} of {total} visits")
