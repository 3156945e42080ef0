"""Settings of a serving benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from speclen.bench.serving.policies import parse_policies
from speclen.bench.serving.recipes import TRACKS, TrackRecipe, recipe_of
from speclen.bench.serving.warm import SETTINGS
from speclen.transport.settings import check_bounds, setting
from speclen.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings, checked as far as possible before anything starts."""

    settings: WorkerConfig
    track: str = setting("mixed", f"{', '.join(TRACKS)}.")
    compare: str = setting("adaptive,none,fixed:3", "Policies, the one it is about first.")
    minutes: float = setting(15.0, "Time for the rounds.", least=0.05)
    repeats: int = setting(0, "Rounds at most, one more not counted; 0: as many as there is time for.", least=0)
    learn_s: float = setting(120.0, "Seconds of the track that `adaptive` serves and learns from beforehand.", least=0)
    block_s: float | None = setting(None, "Seconds of a block; default: the track's own.")
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
    def names(self) -> list[str]:
        """Of the policies. Raises UserError naming one that is unknown."""
        return parse_policies(self.compare, self.settings)

    def facts(self) -> dict[str, Any]:
        """Facts that figures depend on and that are known before anything starts."""
        return {
            "policies": self.names,
            "worker": {name: getattr(self.settings, name) for name in SETTINGS},
            "profile": self.settings.profile and self.settings.profile.name,
            "seed": self.seed,
            "learn_s": self.learn_s,
        }
