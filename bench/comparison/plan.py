"""Settings of a serving benchmark, and the machine's capacity."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from speclen.bench.machine import machine
from speclen.bench.serving.capacity import AGREE, LENGTHS, capacity, capacity_of, is_settled
from speclen.bench.serving.deployment import WorkerSettings
from speclen.bench.serving.load import Yield, closed_loop, explain, request_of
from speclen.bench.serving.policies import Policy, parse_policies
from speclen.bench.serving.prompts import PromptDrawer
from speclen.bench.serving.recipes import ALIASES, SCENARIOS, TrackRecipe, scenario_of
from speclen.bench.serving.tracks import draw_requests
from speclen.bench.serving.warm import WarmWorker
from speclen.cli.support.errors import UserError, say
from speclen.records import Arm
from speclen.transport.settings import check_bounds, setting
from speclen.v1 import generation_pb2 as pb
from speclen.v1.control_pb2 import ContextKey
from speclen.worker.models.devices import processor_model

DRAWN_TOGETHER = 64  # requests of a mix, among which conversations go on


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings, checked as far as possible before anything starts."""

    settings: WorkerSettings
    track: str = setting("mixed", f"{', '.join([*SCENARIOS, *ALIASES])}; or segments.")
    compare: str = setting("adaptive,none,fixed:3", "Policies, the one it is about first.")
    minutes: float = setting(15.0, "Time for the rounds.", least=0.05)
    repeats: int = setting(0, "Rounds at most, one more not counted; 0: as many as there is time for.", least=0)
    resolution: float = setting(0.03, "Stop when every interval is so narrow: 0.03 is ±3%.", least=0.001, most=1)
    learn_s: float = setting(120.0, "Seconds of the track that `adaptive` serves and learns from beforehand.", least=0)
    profile: Path | None = setting(None, "Offline profile: seed of `adaptive`, and source of the tables.")
    visit_s: float = setting(6.0, "Seconds per visit while the capacity is measured.", least=0.2)
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
        """Facts that figures depend on and that are known before anything starts."""
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


def machine_of(context: ContextKey) -> dict[str, Any]:
    """The machine that the worker of this context runs on."""
    import torch  # here, since it takes seconds

    return machine(torch.device("cuda" if "cuda" in context.device else "cpu"))


def measured_capacity(plan: Plan, worker: WarmWorker) -> list[float]:
    """Tokens per second by visit with every slot busy with the track's requests. Raises ValueError with a sentence."""
    seconds = (2 * len(LENGTHS) + 2) * plan.visit_s
    say(f"capacity: about {seconds:.0f} s; --capacity TOKENS_PER_S does without")
    rates = capacity(Visitor(plan, worker), plan.settings.max_length)
    if not is_settled(rates):
        say(f"capacity: the last two of {len(rates)} visits differ by more than {AGREE - 1:.0%}: is the machine quiet?")
    say(f"capacity: {capacity_of(rates):.0f} tokens/s")
    return rates


class Visitor:
    """Serves as many requests at a time as the worker has slots, by an arm, for a while: always the same requests."""

    def __init__(self, plan: Plan, worker: WarmWorker) -> None:
        self._plan, self._worker = plan, worker
        self._drawer = PromptDrawer(load_tokenizer(plan.settings.target))

    def __call__(self, arm: Arm) -> Yield:
        """One visit. Raises ValueError with a sentence."""
        slots = self._plan.settings.max_batch_size
        self._worker.open(Policy("capacity", (arm,) * slots))
        self._worker.use("capacity")
        try:
            loop = closed_loop(self._worker.address, slots, self._requests(), self._plan.visit_s, num_settling=slots)
            found = self._worker.runner.run(loop)
        except grpc.RpcError as error:
            reason = explain(error, self._worker.address)
            raise ValueError(f"measuring the capacity failed with {slots} requests at a time: {reason}") from error
        if not found.tokens:
            raise ValueError(f"no token came in {found.seconds:g} s: use a larger --visit-s")
        return found

    def _requests(self) -> Iterator[pb.GenerateRequest]:
        """Requests of all kinds that the track has."""
        rng, mixes = np.random.default_rng([self._plan.seed, 1_000_000]), self._plan.recipe.mixes
        while True:
            drawn = [draw_requests(rng, np.zeros(DRAWN_TOGETHER), mix) for mix in mixes]
            for each in itertools.chain.from_iterable(zip(*drawn, strict=True)):
                prompt = self._drawer.draw(each.kind, each.prompt_tokens, each.prompt_seed)
                yield request_of(each, prompt)


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
