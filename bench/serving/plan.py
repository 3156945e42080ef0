"""Settings of a serving benchmark, and the policies that it compares."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from speclen.bench.serving.traffic import TRACKS, TrackRecipe, recipe_of
from speclen.bench.serving.warm import SETTINGS
from speclen.cli.support.output import UserError
from speclen.process.settings import check_bounds, setting
from speclen.worker.config import WorkerConfig

# The adaptive policy begun without data, and begun with the profile; the other policies are a worker's own.
LEARNERS = ("adaptive", "seeded")
SLOTS = 16  # of a worker whose track has no concurrency of its own


def parse_policies(text: str, settings: WorkerConfig) -> list[str]:
    """Names in a list such as "adaptive,none,fixed:1-8,n-gram". Raises UserError naming a policy that a worker refuses."""
    names = [expanded for name in text.split(",") if name.strip() for expanded in expand(name.strip())]
    if not names:
        raise UserError("--compare names no policy: use for example adaptive,none,fixed:3")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--compare names {repeated} twice: name each policy once")
    if "seeded" in names and settings.profile is None:
        raise UserError("--compare seeded needs --profile FILE: make one with `speclen profile run`")
    for name in names:
        try:
            replace(settings, policy="adaptive" if name in LEARNERS else name)
        except ValueError as error:
            raise UserError(f"--compare {name}: {error}") from error
    return names


def expand(name: str) -> list[str]:
    """ "fixed:0-3" is none, fixed:1, fixed:2 and fixed:3; everything else is itself."""
    match = re.fullmatch(r"fixed:(\d{1,2})(?:-(\d{1,2}))?", name)
    if not match:
        return [name]
    return [f"fixed:{n}" if n else "none" for n in range(int(match[1]), int(match[2] or match[1]) + 1)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a comparison, checked as far as possible before anything starts."""

    settings: WorkerConfig
    track: str = setting("mixed", f"{', '.join(TRACKS)}.")
    compare: str = setting("adaptive,none,fixed:3", "Policies, the one it is about first.")
    minutes: float = setting(
        15.0, "Most minutes of rounds; they end sooner once all ratios are known to within 3%.", least=0.05
    )
    repeats: int = setting(0, "Most rounds, after one that is not counted; 0: as many as there is time for.", least=0)
    learn_s: float = setting(120.0, "Seconds of the track that each learning policy serves beforehand.", least=0)
    block_s: float | None = setting(
        None, "Seconds of a block, in closed loops roughly: scales its requests; default: the track's own."
    )
    capacity: float | None = setting(None, "Tokens per second that loads are shares of; default: measured.")
    seed: int = setting(0, "Draws arrivals, prompts, output lengths and the sampling seeds.", least=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.capacity is not None and not 0.0 < self.capacity < math.inf:
            raise ValueError(f"--capacity is {self.capacity}; it must be a number of tokens per second above 0")

    @property
    def recipe(self) -> TrackRecipe:
        """Raises ValueError for a track that cannot be read."""
        return recipe_of(self.track)

    @property
    def learners(self) -> list[str]:
        """The policies that learn."""
        return [name for name in self.names if name in LEARNERS]

    @property
    def names(self) -> list[str]:
        """Names of the policies. Raises UserError naming one that is unknown."""
        return parse_policies(self.compare, self.settings)

    def facts(self) -> dict[str, Any]:
        """Settings that figures depend on."""
        return {
            "policies": self.names,
            "worker": {name: getattr(self.settings, name) for name in SETTINGS},
            "profile": self.settings.profile and self.settings.profile.name,
            "seed": self.seed,
            "learn_s": self.learn_s,
        }
