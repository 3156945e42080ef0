"""Traffic to serve: when requests arrive, what they ask, and what happens to the machine meanwhile.

A track is a recipe for blocks of some seconds. Every policy serves the same block before the next one is drawn, so that
what the machine does in a minute falls on all of them; the next block follows the same recipe from another seed.

Rates are given as load, a share of the machine's capacity (generated tokens per second at the best fixed length with
every row busy), so that a track means the same on a laptop and on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Output lengths are log-normal, as in traces of chat traffic, and cut so that no request outlasts a block by much.
MEAN_OUTPUT_TOKENS = 64
OUTPUT_SIGMA = 0.6
OUTPUT_RANGE = (8, 192)
PROMPT_TOKENS = {
    "code": (24, 40, 64, 96),
    "prose": (24, 40, 64, 96),
    "noise": (24, 40, 64, 96),
    "edit": (96, 128, 160),
    "extract": (96, 128, 192),
    "quote": (96, 128, 160),
}
# A conversation's next turn sends all of it again, and as many tokens more.
FIRST_TURN_TOKENS, TURN_TOKENS, MAX_TURNS, CONTINUED_SHARE = 64, 64, 4, 0.6
GRID_POINTS = 2001  # for turning a ramp into arrival times: finer than any gap that matters
MAX_ARRIVALS = 100_000
MAX_DRAWS = 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. prompt_seed draws its prompt: the same seed, kind and number of tokens give the same prompt.

    Turns of one conversation share the seed, and each prompt begins with the one before. sampling_seed: of its noise.
    """

    at_s: float
    kind: str
    prompt_seed: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    sampling_seed: int = 0


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are. kinds: with their shares, which add up to 1. temperatures: equally many of each."""

    kinds: tuple[tuple[str, float], ...]
    temperatures: tuple[float, ...] = (0.0,)


CODE = Mix((("code", 1.0),))
PROSE = Mix((("prose", 1.0),))
MIXED = Mix(
    (("code", 0.3), ("edit", 0.2), ("extract", 0.1), ("quote", 0.05), ("prose", 0.1), ("chat", 0.25)), (0.0, 0.7, 1.0)
)
COPYING = Mix((("edit", 0.6), ("extract", 0.2), ("quote", 0.2)))
SAMPLED = Mix((("code", 0.7), ("chat", 0.3)), (0.7, 1.0))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of traffic. share: of the block's duration. load: share of capacity, from start to end (a ramp).

    cv: coefficient of variation of the gaps between arrivals, gamma distributed; 1 is Poisson, more is burstier.
    """

    share: float
    load: float
    load_end: float
    cv: float = 1.0
    mix: Mix = CODE


@dataclass(frozen=True, slots=True)
class TrackRecipe:
    """What the blocks of a named track are made of.

    burstiness: factors of the segments' cv, taking turns from block to block. throttle_share: of the block, after which
    another process takes a core. cold: every block starts with an empty database for the policy `cold`, and what came
    before its settle_steps-th step is told apart. wrong_profile: needs a profile that fits other traffic.
    """

    summary: str
    segments: tuple[Segment, ...]
    block_s: float = 10.0
    burstiness: tuple[float, ...] = (1.0,)
    throttle_share: float | None = None
    settle_steps: int = 0
    wrong_profile: bool = False

    @property
    def cold(self) -> bool:
        return self.settle_steps > 0

    @property
    def mixes(self) -> tuple[Mix, ...]:
        """Each kind of traffic once, in order."""
        return tuple(dict.fromkeys(segment.mix for segment in self.segments))


def steady(load: float, share: float = 1.0, cv: float = 1.0, mix: Mix = MIXED) -> Segment:
    return Segment(share, load, load, cv, mix)


def alternating(mix: Mix) -> tuple[Segment, ...]:
    """The paper's traffic: sparse and intense stretches take turns, here twice in a block."""
    return (steady(0.15, 0.3, mix=mix), steady(0.8, 0.2, mix=mix)) * 2


GROWING = (1.0, 2.0, 3.0, 4.0)
SCENARIOS: dict[str, TrackRecipe] = {
    "mixed": TrackRecipe(
        "all kinds of requests at temperatures 0, 0.7 and 1; sparse and intense stretches take turns, burstiness grows",
        alternating(MIXED),
        burstiness=GROWING,
    ),
    "copying": TrackRecipe("edits, extraction and quotes, whose answers repeat their prompts", alternating(COPYING)),
    "time-varying": TrackRecipe(
        "the paper's: greedy completions, and a load that varies", alternating(CODE), 10.0, GROWING
    ),
    "steady-low": TrackRecipe("mixed requests, few at a time", (steady(0.15),)),
    "steady-high": TrackRecipe("mixed requests, close to capacity", (steady(0.8),)),
    "burst": TrackRecipe("few requests, and a burst at four times capacity", (steady(0.15, 0.9), steady(4.0, 0.1))),
    "prompt-shift": TrackRecipe(
        "half-way from greedy code, which the draft knows, to sampled prose, which it does not",
        (steady(0.4, 0.5, mix=CODE), steady(0.4, 0.5, mix=dataclasses.replace(PROSE, temperatures=(0.7, 1.0)))),
        block_s=16.0,
    ),
    "throttle": TrackRecipe("half-way another process takes a core", (steady(0.35),), 16.0, throttle_share=0.5),
    "wrong-profile": TrackRecipe(
        "sampled traffic, seeded from a profile of greedy text", alternating(SAMPLED), wrong_profile=True
    ),
    "cold": TrackRecipe(
        "nothing known at the start of every block; before and after 1,000 steps apart",
        tuple(Segment(1 / 4, *loads, mix=MIXED) for loads in ((0.1, 0.8), (0.8, 0.1)) * 2),
        block_s=40.0,
        settle_steps=1000,
    ),
}
ALIASES = {"mixed-temperature": "mixed"}


def scenario_of(text: str) -> TrackRecipe:
    """A named scenario, or one spelled out: "for=30 load=0.2; for=60 load=0.2..0.8 cv=2 mix=mixed".

    Raises ValueError naming what cannot be read.
    """
    text = ALIASES.get(text, text)
    if text in SCENARIOS:
        return SCENARIOS[text]
    if "=" not in text:
        raise ValueError(
            f"track {text!r} is unknown: use {', '.join([*SCENARIOS, *ALIASES])}, or segments like "
            '"for=5 load=0.2; for=10 load=0.2..0.8 cv=2"'
        )
    seconds, segments = [], []
    for part in text.split(";"):
        length, segment = _parse_segment(part.strip())
        seconds.append(length)
        segments.append(segment)
    total = sum(seconds)
    shared = tuple(dataclasses.replace(s, share=t / total) for s, t in zip(segments, seconds, strict=True))
    return TrackRecipe("spelled out", shared, block_s=total)


MIXES = {"code": CODE, "prose": PROSE, "mixed": MIXED, "copying": COPYING, "sampled": SAMPLED}


def _parse_segment(text: str) -> tuple[float, Segment]:
    fields = dict(word.partition("=")[::2] for word in text.split())
    unknown = set(fields) - {"for", "load", "cv", "mix"}
    try:
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is no field")
        first, _, last = fields["load"].partition("..")
        mix = MIXES.get(fields.get("mix", "code"))
        if mix is None:
            raise ValueError(f"mix is one of {', '.join(MIXES)}")
        segment = Segment(1.0, float(first), float(last or first), float(fields.get("cv", 1)), mix)
        seconds = float(fields["for"])
        if not (seconds > 0 and segment.cv > 0 and min(segment.load, segment.load_end) >= 0):
            raise ValueError("for and cv must be positive and load not negative")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"segment {text!r} cannot be read ({error}): write for=SECONDS load=SHARE or FROM..TO, cv=NUMBER, mix=NAME"
        ) from error
    return seconds, segment


@dataclass(frozen=True, slots=True)
class Block:
    """Arrivals in order of time, all before duration_s. number: of the round that it is drawn for.

    throttle_at_s: when another process takes a core.
    """

    track: str
    number: int
    duration_s: float
    arrivals: tuple[Arrival, ...]
    throttle_at_s: float | None = None


def make_block(
    track: str,
    capacity_tokens_per_s: float,
    number: int = 0,
    seed: int = 0,
    duration_s: float | None = None,
    scale: float = 1.0,
) -> Block:
    """Draw a block. scale multiplies every load; duration_s stretches or shortens the segments alike.

    Raises ValueError for an unknown track, a capacity or duration that is not positive, or a block without arrivals.
    """
    recipe = scenario_of(track)
    seconds = recipe.block_s if duration_s is None else duration_s
    for what, value in (("capacity", capacity_tokens_per_s), ("duration", seconds), ("scale", scale)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {what} of a track must be positive, not {value:g}")
    rate = scale * capacity_tokens_per_s / MEAN_OUTPUT_TOKENS
    expected = rate * seconds * sum(s.share * (s.load + s.load_end) / 2 for s in recipe.segments)
    if expected > MAX_ARRIVALS:
        raise ValueError(f"a block has about {expected:.3g} arrivals: use a smaller --scale or --block-s")
    factor = recipe.burstiness[number % len(recipe.burstiness)]
    # Bursty traffic may leave a short block empty, which would say nothing: then it is drawn again.
    for attempt in range(MAX_DRAWS):
        rng = np.random.default_rng([seed, number, attempt])
        if arrivals := draw_arrivals(rng, recipe.segments, rate, seconds, factor):
            break
    else:
        raise ValueError(
            f"no request arrives in {seconds:g} s at this load: use a longer --block-s or a larger --scale"
        )
    throttle = None if recipe.throttle_share is None else recipe.throttle_share * seconds
    return Block(ALIASES.get(track, track), number, seconds, tuple(arrivals), throttle)


def draw_arrivals(
    rng: np.random.Generator, segments: Sequence[Segment], rate: float, seconds: float, burstiness: float
) -> list[Arrival]:
    """rate: requests per second at a load of 1."""
    arrivals: list[Arrival] = []
    start = 0.0
    for segment in segments:
        length = segment.share * seconds
        cv = segment.cv * burstiness
        times = start + arrival_times(rng, rate * segment.load, rate * segment.load_end, length, cv)
        arrivals.extend(draw_requests(rng, times, segment.mix))
        start += length
    return arrivals


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


def draw_requests(rng: np.random.Generator, times: np.ndarray, mix: Mix) -> list[Arrival]:
    """What is asked at each of these times."""
    names, shares = zip(*mix.kinds, strict=True)
    kinds = rng.choice(names, size=len(times), p=shares)
    temperatures = rng.choice(mix.temperatures, size=len(times))
    mean_log = math.log(MEAN_OUTPUT_TOKENS) - OUTPUT_SIGMA**2 / 2
    outputs = np.clip(rng.lognormal(mean_log, OUTPUT_SIGMA, size=len(times)), *OUTPUT_RANGE).astype(int)
    turns = Conversations(rng)
    found = []
    for at_s, kind, output, temperature in zip(times, kinds, outputs, temperatures, strict=True):
        seed, tokens = turns.next() if kind == "chat" else (draw_seed(rng), int(rng.choice(PROMPT_TOKENS[kind])))
        found.append(
            Arrival(round(float(at_s), 6), str(kind), seed, tokens, int(output), float(temperature), draw_seed(rng))
        )
    return found


def draw_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


class Conversations:
    """Whose turn is next: a new conversation's first, or the next one of a conversation that is going on."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._open: list[tuple[int, int]] = []  # seed and turns so far

    def next(self) -> tuple[int, int]:
        """Seed of the conversation, and tokens of all that has been said."""
        seed, turns = draw_seed(self._rng), 0
        if self._open and self._rng.random() < CONTINUED_SHARE:
            seed, turns = self._open.pop(int(self._rng.integers(len(self._open))))
        if turns + 1 < MAX_TURNS:
            self._open.append((seed, turns + 1))
        return seed, FIRST_TURN_TOKENS + turns * TURN_TOKENS
