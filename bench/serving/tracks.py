"""Traffic to serve: when requests arrive, what they ask, and what happens to the machine meanwhile.

Rates are given as load, a share of the machine's capacity (generated tokens per second at the best fixed length with
every row busy), so that a track means the same on a laptop and on a GPU. A track is drawn once from its seed, and every
policy that is compared serves exactly the same one; it may be saved and replayed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

PROMPT_TOKENS = (24, 40, 64, 96)  # drawn uniformly
# Output lengths are log-normal, as in traces of chat traffic, and cut so that no request outlasts a short track.
MEAN_OUTPUT_TOKENS = 64
OUTPUT_SIGMA = 0.6
OUTPUT_RANGE = (8, 192)
GRID_POINTS = 2001  # for turning a ramp into arrival times: finer than any gap that matters
MAX_ARRIVALS = 200_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. prompt_seed draws its prompt: the same seed, kind and number of tokens give the same prompt."""

    at_s: float
    kind: str
    prompt_seed: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of traffic. share: of the track's duration. load: share of capacity, from start to end (a ramp).

    cv: coefficient of variation of the gaps between arrivals, gamma distributed; 1 is Poisson, more is burstier.
    """

    share: float
    load: float
    load_end: float
    cv: float = 1.0
    kind: str = "code"


@dataclass(frozen=True, slots=True)
class Track:
    """Arrivals in order of time, all before duration_s.

    Requests that arrive before warm_up_s are served but not counted. throttle_at_s: when another process takes a core.
    settle_steps: counting starts only after the learning worker has done so many steps. capacity_tokens_per_s: what
    the loads were shares of.
    """

    name: str
    seed: int
    duration_s: float
    warm_up_s: float
    capacity_tokens_per_s: float
    arrivals: tuple[Arrival, ...]
    throttle_at_s: float | None = None
    settle_steps: int = 0

    def counted(self, from_s: float | None = None) -> list[int]:
        """Positions of the arrivals that are counted; from_s replaces the warm-up when it is later."""
        start = max(self.warm_up_s, from_s or 0.0)
        return [index for index, arrival in enumerate(self.arrivals) if arrival.at_s >= start]


@dataclass(frozen=True, slots=True)
class TrackRecipe:
    """What a named track is made of. cold: policies that learn start from nothing. others: needs a foreign profile."""

    summary: str
    segments: tuple[Segment, ...]
    duration_s: float = 150.0
    throttle_share: float | None = None
    settle_steps: int = 0
    cold: bool = False
    foreign_profile: bool = False


def steady(load: float, share: float = 1.0, cv: float = 1.0, kind: str = "code") -> Segment:
    return Segment(share, load, load, cv, kind)


# The paper's traffic: intense and sparse stretches take turns while the burstiness grows.
ALTERNATING = tuple(steady(load, 1 / 8, cv) for cv in (1.0, 2.0, 3.0, 4.0) for load in (0.15, 0.75))
BURSTS = tuple(segment for _ in range(4) for segment in (steady(0.15, 0.225), steady(4.0, 0.025)))
SCENARIOS: dict[str, TrackRecipe] = {
    "steady-low": TrackRecipe("few requests at a time", (steady(0.15),)),
    "steady-high": TrackRecipe("close to capacity", (steady(0.9),)),
    "time-varying": TrackRecipe("intense and sparse stretches take turns, burstiness grows (the paper's)", ALTERNATING),
    "burst": TrackRecipe("few requests, and four bursts at four times capacity", BURSTS),
    "prompt-shift": TrackRecipe(
        "half-way from prompts that the draft knows to prompts that it does not",
        (steady(0.4, 0.5), steady(0.4, 0.5, kind="prose")),
    ),
    "throttle": TrackRecipe("half-way another process takes a core", (steady(0.35),), throttle_share=0.5),
    "wrong-profile": TrackRecipe("seeded from another machine's profile", ALTERNATING, foreign_profile=True),
    "cold": TrackRecipe(
        "nothing known at the start, counted after 500 steps",
        tuple(Segment(1 / 4, *loads) for loads in ((0.1, 0.8), (0.8, 0.1)) * 2),
        settle_steps=500,
        cold=True,
    ),
}


def scenario_of(text: str) -> TrackRecipe:
    """A named scenario, or one spelled out: "for=30 load=0.2; for=60 load=0.2..0.8 cv=2 kind=prose".

    Raises ValueError naming what cannot be read.
    """
    if text in SCENARIOS:
        return SCENARIOS[text]
    if "=" not in text:
        raise ValueError(
            f"track {text!r} is unknown: use {', '.join(SCENARIOS)}, a saved track's file, "
            'or segments like "for=30 load=0.2; for=60 load=0.2..0.8 cv=2"'
        )
    seconds, segments = [], []
    for part in text.split(";"):
        length, segment = _parse_segment(part.strip())
        seconds.append(length)
        segments.append(segment)
    total = sum(seconds)
    shared = tuple(dataclasses.replace(s, share=t / total) for s, t in zip(segments, seconds, strict=True))
    return TrackRecipe("spelled out", shared, duration_s=total)


def _parse_segment(text: str) -> tuple[float, Segment]:
    fields = dict(word.partition("=")[::2] for word in text.split())
    unknown = set(fields) - {"for", "load", "cv", "kind"}
    try:
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is no field")
        first, _, last = fields["load"].partition("..")
        segment = Segment(
            1.0, float(first), float(last or first), float(fields.get("cv", 1)), fields.get("kind", "code")
        )
        seconds = float(fields["for"])
        if not (seconds > 0 and segment.cv > 0 and min(segment.load, segment.load_end) >= 0):
            raise ValueError("for and cv must be positive and load not negative")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"segment {text!r} cannot be read ({error}): write for=SECONDS load=SHARE or FROM..TO, cv=NUMBER, kind=NAME"
        ) from error
    return seconds, segment


def make_track(
    name: str,
    capacity_tokens_per_s: float,
    seed: int = 0,
    duration_s: float | None = None,
    scale: float = 1.0,
    warm_up_share: float = 0.1,
) -> Track:
    """Draw a track. scale multiplies every load; duration_s stretches or shortens the segments alike.

    Raises ValueError for an unknown name, a capacity or duration that is not positive, or a track without arrivals.
    """
    scenario = scenario_of(name)
    seconds = scenario.duration_s if duration_s is None else duration_s
    for what, value in (("capacity", capacity_tokens_per_s), ("duration", seconds), ("scale", scale)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {what} of a track must be positive, not {value:g}")
    rng = np.random.default_rng(seed)
    rate = scale * capacity_tokens_per_s / MEAN_OUTPUT_TOKENS
    expected = rate * seconds * sum(s.share * (s.load + s.load_end) / 2 for s in scenario.segments)
    if expected > MAX_ARRIVALS:
        raise ValueError(f"the track has about {expected:.3g} arrivals: use a smaller --scale or --duration-s")
    arrivals: list[Arrival] = []
    start = 0.0
    for segment in scenario.segments:
        length = segment.share * seconds
        times = start + arrival_times(rng, rate * segment.load, rate * segment.load_end, length, segment.cv)
        arrivals.extend(draw_requests(rng, times, segment.kind))
        start += length
    if not arrivals:
        raise ValueError(
            f"no request arrives in {seconds:g} s at this load: use a longer --duration-s or a larger --scale"
        )
    throttle = scenario.throttle_share
    return Track(
        name=name if name in SCENARIOS else "custom",
        seed=seed,
        duration_s=seconds,
        warm_up_s=warm_up_share * seconds,
        capacity_tokens_per_s=capacity_tokens_per_s,
        arrivals=tuple(arrivals),
        throttle_at_s=None if throttle is None else throttle * seconds,
        settle_steps=scenario.settle_steps,
    )


def arrival_times(rng: np.random.Generator, rate: float, rate_end: float, length_s: float, cv: float) -> np.ndarray:
    """Times in [0, length_s) of a gamma renewal process whose rate goes linearly from rate to rate_end per second.

    Drawn at rate 1 in the time scale of the integrated rate, then mapped back, so that a ramp keeps its burstiness.
    """
    expected = (rate + rate_end) / 2 * length_s
    if expected <= 0:
        return np.zeros(0)
    gaps: list[np.ndarray] = []
    total = 0.0
    while total < expected:
        drawn = rng.gamma(1 / cv**2, cv**2, size=max(16, int(expected)))
        gaps.append(drawn)
        total += float(drawn.sum())
    passed = np.cumsum(np.concatenate(gaps))
    passed = passed[passed < expected]
    grid = np.linspace(0.0, length_s, GRID_POINTS)
    integrated = rate * grid + (rate_end - rate) * grid**2 / (2 * length_s)
    return np.interp(passed, integrated, grid)


def draw_requests(rng: np.random.Generator, times: np.ndarray, kind: str) -> list[Arrival]:
    prompts = rng.choice(PROMPT_TOKENS, size=len(times))
    mean_log = math.log(MEAN_OUTPUT_TOKENS) - OUTPUT_SIGMA**2 / 2
    outputs = np.clip(rng.lognormal(mean_log, OUTPUT_SIGMA, size=len(times)), *OUTPUT_RANGE).astype(int)
    seeds = rng.integers(2**31, size=len(times))
    return [
        Arrival(round(float(at), 6), kind, int(seed), int(prompt), int(output))
        for at, seed, prompt, output in zip(times, seeds, prompts, outputs, strict=True)
    ]
