"""Workloads: when requests arrive, and their prompts and lengths.

A workload is a recipe for blocks of some seconds. Every policy serves the same block before the next one is drawn, so that
a slow minute of the machine affects all of them; the next block follows the same recipe from another seed.
Rates are given as load, a share of the machine's capacity, so that a workload means the same on a laptop and on a GPU.
Capacity is the rate of generated tokens at the best fixed length with every slot busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

MEAN_OUTPUT_TOKENS = 64
# Kinds of prompts for chat models, with texts in chat.toml.
CHAT_KINDS = ("chat-instruction", "chat-turns", "chat-code", "chat-edit", "chat-summary", "chat-extract")


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of requests. kinds: with shares that add up to 1. temperatures: used equally often.

    mean_tokens: mean length of an answer. most_tokens: limit of an answer that the model ends by itself; None: the length is
    drawn, and end tokens are ignored.
    """

    kinds: tuple[tuple[str, float], ...]
    temperatures: tuple[float, ...] = (0.0,)
    mean_tokens: float = MEAN_OUTPUT_TOKENS
    most_tokens: int | None = None


MIXED = Mix(
    (("code", 0.3), ("edit", 0.2), ("extract", 0.1), ("quote", 0.05), ("prose", 0.1), ("chat", 0.25)), (0.0, 0.7, 1.0)
)
COPYING = Mix((("edit", 0.6), ("extract", 0.2), ("quote", 0.2)))
CHAT = Mix(tuple((kind, 1 / len(CHAT_KINDS)) for kind in CHAT_KINDS), (0.0, 0.7, 1.0), mean_tokens=128, most_tokens=384)

# The paper's traffic: sparse and intense stretches take turns, here twice in a block. (Share of the block, load.)
ALTERNATING = ((0.3, 0.15), (0.2, 0.8)) * 2
GROWING = (1.0, 2.0, 3.0, 4.0)
# The largest first: as it ends it passes through all smaller sizes, so that the warm-up round covers them.
FALLING = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class TrackRecipe:
    """Recipe for the blocks of a named workload.

    at_once: requests under way, one number a block, in turn; the next request is sent when one ends. Empty: requests
    arrive at the loads of ALTERNATING. burstiness: coefficients of variation of the gaps between arrivals, gamma
    distributed, one a block, in turn; 1 is Poisson, more is burstier.
    """

    summary: str
    mix: Mix
    block_s: float = 10.0
    at_once: tuple[int, ...] = ()
    burstiness: tuple[float, ...] = (1.0,)


TRACKS: dict[str, TrackRecipe] = {
    "mixed": TrackRecipe(
        "all kinds of requests at temperatures 0, 0.7 and 1; sparse and intense stretches take turns, burstiness grows",
        MIXED,
        burstiness=GROWING,
    ),
    "closed": TrackRecipe("mixed requests at a fixed concurrency", MIXED, 5.0, FALLING),
    "closed-wide": TrackRecipe("as closed, up to 32 at a time", MIXED, 5.0, (32, 16, 4, 1)),
    "closed-copying": TrackRecipe("edits, extraction and quotes at a fixed concurrency", COPYING, 5.0, FALLING),
    "chat": TrackRecipe("a chat model that ends its answers; sparse and intense stretches take turns", CHAT, 40.0),
    "closed-chat": TrackRecipe("a chat model that ends its answers, at a fixed concurrency", CHAT, 40.0, FALLING),
}


def recipe_of(track: str) -> TrackRecipe:
    """Recipe by name. Raises ValueError if the name is unknown."""
    if track not in TRACKS:
        raise ValueError(f"track {track!r} is unknown: use {', '.join(TRACKS)}")
    return TRACKS[track]


# Output lengths are log-normal, as in traces of chat traffic, and bounded so that no request outlasts a block by much.
OUTPUT_SIGMA = 0.6
OUTPUT_RANGE = (8, 192)
PROMPT_TOKENS = {
    "code": (24, 40, 64, 96),
    "prose": (24, 40, 64, 96),
    "edit": (96, 128, 160),
    "extract": (96, 128, 192),
    "quote": (96, 128, 160),
}
# A conversation's next turn sends all earlier turns again, and as many new tokens.
FIRST_TURN_TOKENS, TURN_TOKENS, MAX_TURNS, CONTINUED_SHARE = 64, 64, 4, 0.6
# Requests of a closed loop: similar seconds of work at every concurrency, and long compared with its end.
CLOSED_REQUESTS, CLOSED_REQUESTS_PER_ROW = 16, 4
MAX_ARRIVALS = 100_000
MAX_DRAWS = 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. The same prompt_seed, kind and prompt_tokens give the same prompt.

    Turns of one conversation share the seed, and each prompt begins with the previous one. prompt_tokens: 0 if the text
    decides. output_tokens: the maximum if ends_itself, which means that the model ends its answer.
    """

    at_s: float
    kind: str
    prompt_seed: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    sampling_seed: int = 0
    ends_itself: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Arrivals in order of time, all before duration_s. number: of its round.

    at_once: concurrency of a closed loop, which ignores at_s; None: an open loop.
    """

    track: str
    number: int
    duration_s: float
    arrivals: tuple[Arrival, ...]
    at_once: int | None = None


def make_block(
    track: str, capacity_tokens_per_s: float, number: int = 0, seed: int = 0, duration_s: float | None = None
) -> Block:
    """Draw a block. duration_s scales all stretches of the recipe.

    Raises ValueError for an unknown workload, a capacity or duration that is not positive, or a block without arrivals.
    """
    recipe = recipe_of(track)
    seconds = recipe.block_s if duration_s is None else duration_s
    for what, value in (("capacity", capacity_tokens_per_s), ("duration", seconds)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {what} of a track is {value:g}; it must be above 0")
    if recipe.at_once:
        return closed_block(track, recipe, number, seed, seconds)
    rate = capacity_tokens_per_s / recipe.mix.mean_tokens
    expected = rate * seconds * sum(share * load for share, load in ALTERNATING)
    if expected > MAX_ARRIVALS:
        raise ValueError(f"a block has about {expected:.3g} arrivals: use a smaller --capacity or --block-s")
    # Bursty traffic may leave a short block empty: then it is drawn again.
    for attempt in range(MAX_DRAWS):
        rng = np.random.default_rng([seed, number, attempt])
        if arrivals := draw_arrivals(rng, recipe, rate, seconds, number):
            return Block(track, number, seconds, tuple(arrivals))
    raise ValueError(f"no request arrives in {seconds:g} s at this load: use a longer --block-s")


def closed_block(track: str, recipe: TrackRecipe, number: int, seed: int, seconds: float) -> Block:
    """A closed loop's requests. seconds: scales their number relative to the recipe's duration."""
    at_once = recipe.at_once[number % len(recipe.at_once)]
    wanted = (CLOSED_REQUESTS + CLOSED_REQUESTS_PER_ROW * at_once) * seconds / recipe.block_s
    times = np.zeros(min(MAX_ARRIVALS, max(at_once, round(wanted))))
    arrivals = draw_requests(np.random.default_rng([seed, number]), times, recipe.mix)
    return Block(track, number, seconds, tuple(arrivals), at_once)


def draw_arrivals(
    rng: np.random.Generator, recipe: TrackRecipe, rate: float, seconds: float, number: int
) -> list[Arrival]:
    """Arrivals of an open loop. rate: requests per second at a load of 1."""
    arrivals: list[Arrival] = []
    start, turns, cv = 0.0, Conversations(rng), recipe.burstiness[number % len(recipe.burstiness)]
    for share, load in ALTERNATING:
        times = start + arrival_times(rng, rate * load, share * seconds, cv)
        arrivals.extend(draw_requests(rng, times, recipe.mix, turns))
        start += share * seconds
    return arrivals


def arrival_times(rng: np.random.Generator, rate: float, length_s: float, cv: float) -> np.ndarray:
    """Times in [0, length_s) of a gamma renewal process of that rate per second.

    The process is stationary: a stretch begins at a random point of a gap, which is drawn in proportion to its length. If
    it began at an arrival, a short stretch of bursty traffic would contain a burst, however low its rate.
    """
    expected = rate * length_s
    total = float(rng.random() * rng.gamma(1 / cv**2 + 1, cv**2))
    gaps = [np.array([total])]
    while total < expected:
        drawn = rng.gamma(1 / cv**2, cv**2, size=max(16, int(expected)))
        gaps.append(drawn)
        total += float(drawn.sum())
    passed = np.cumsum(np.concatenate(gaps))
    times: np.ndarray = passed[passed < expected] / rate
    return times


def draw_requests(
    rng: np.random.Generator, times: np.ndarray, mix: Mix, turns: Conversations | None = None
) -> list[Arrival]:
    """One request for each of these times. turns: open conversations; None: none yet."""
    names, shares = zip(*mix.kinds, strict=True)
    kinds = rng.choice(names, size=len(times), p=shares)
    temperatures = rng.choice(mix.temperatures, size=len(times))
    mean_log = math.log(MEAN_OUTPUT_TOKENS) - OUTPUT_SIGMA**2 / 2
    outputs = np.clip(rng.lognormal(mean_log, OUTPUT_SIGMA, size=len(times)), *OUTPUT_RANGE).astype(int)
    turns = Conversations(rng) if turns is None else turns
    found = []
    for at_s, kind, output, temperature in zip(times, kinds, outputs, temperatures, strict=True):
        seed, tokens = (
            turns.next() if kind == "chat" else (draw_seed(rng), int(rng.choice(PROMPT_TOKENS.get(kind, (0,)))))
        )
        arrival = Arrival(
            round(float(at_s), 6), str(kind), seed, tokens, int(output), float(temperature), draw_seed(rng)
        )
        if mix.most_tokens is not None:
            arrival = replace(arrival, output_tokens=mix.most_tokens, ends_itself=True)
        found.append(arrival)
    return found


def draw_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


class Conversations:
    """Draws the first turn of a new conversation, or the next one of an open conversation."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._open: list[tuple[int, int]] = []  # seed and turns so far

    def next(self) -> tuple[int, int]:
        """Seed of the conversation, and tokens of all its turns so far."""
        seed, turns = draw_seed(self._rng), 0
        if self._open and self._rng.random() < CONTINUED_SHARE:
            seed, turns = self._open.pop(int(self._rng.integers(len(self._open))))
        if turns + 1 < MAX_TURNS:
            self._open.append((seed, turns + 1))
        return seed, FIRST_TURN_TOKENS + turns * TURN_TOKENS
