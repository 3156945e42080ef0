"""Workloads: when requests arrive, and their prompts and lengths.

A workload is a recipe for blocks. Every policy serves the same block before the next one is drawn, so that a slow minute of
the machine affects all of them; the next block follows the same recipe from another seed.

In a closed loop a request is sent when fewer than a given number are under way, and the block goes through stages of
different concurrency and text. In an open loop requests arrive at rates that are given as load, a share of the machine's
capacity, so that a workload means the same on a laptop and on a GPU. Capacity is the rate of generated tokens at the best
fixed length with every slot busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

# Kinds of prompts for chat models, with texts in chat.toml.
CHAT_KINDS = ("chat-instruction", "chat-turns", "chat-code", "chat-edit", "chat-summary", "chat-extract")
# Answers of models that continue source code have lengths that are drawn, log-normal as in traces of chat traffic.
MEAN_OUTPUT_TOKENS, SHORTEST_OUTPUT = 64, 8
# A chat model ends its answers by itself, or is stopped here.
MEAN_CHAT_TOKENS, LONGEST_CHAT_TOKENS = 128, 384

Kinds = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of requests. kinds, chat_kinds: of a model that continues text, and of a chat model; shares add up to 1.

    temperatures: used equally often. mean_tokens, sigma, longest: of the output lengths that are drawn. prompt_scale: times
    the tokens of PROMPT_TOKENS.
    """

    kinds: Kinds
    chat_kinds: Kinds
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    mean_tokens: int = MEAN_OUTPUT_TOKENS
    sigma: float = 0.6
    longest: int = 192
    prompt_scale: int = 1


MIXED = Mix(
    (("code", 0.3), ("edit", 0.2), ("extract", 0.1), ("quote", 0.05), ("prose", 0.1), ("chat", 0.25)),
    tuple((kind, 1 / len(CHAT_KINDS)) for kind in CHAT_KINDS),
)
COPYING = Mix(
    (("edit", 0.6), ("extract", 0.2), ("quote", 0.2)), (("chat-edit", 0.6), ("chat-extract", 0.4)), temperatures=(0.0,)
)
# Text that does not repeat itself: n-grams find little.
FRESH = Mix(
    (("code", 0.4), ("prose", 0.3), ("chat", 0.3)),
    (("chat-instruction", 0.4), ("chat-turns", 0.3), ("chat-summary", 0.3)),
    temperatures=(0.7, 1.0),
)
# Turns of agents, which quote at length the files and the tool output that they are sent.
QUOTING = replace(COPYING, temperatures=(0.0, 0.7), mean_tokens=128, longest=384, prompt_scale=3)
# A batch job, such as the rollouts of reinforcement learning: the longest of 64 outputs has about five times the mean.
LONG_TAILED = replace(MIXED, mean_tokens=128, sigma=1.0, longest=768)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a closed loop. mixes: each with the number of its requests under way. num_requests: in the stage.

    streamed: False for jobs that read whole answers.
    """

    mixes: tuple[tuple[int, Mix], ...]
    num_requests: int
    streamed: bool = True

    @property
    def at_once(self) -> int:
        return sum(number for number, _ in self.mixes)


def stage(*mixes: tuple[int, Mix], base: int = 3, per_slot: int = 1) -> Stage:
    """A stage with similar seconds of work at every concurrency."""
    return Stage(mixes, base + per_slot * sum(number for number, _ in mixes))


def falling(mix: Mix, *sizes: int) -> tuple[Stage, ...]:
    """A fixed concurrency for a while, then the next smaller one: few requests of one stage run into the next."""
    return tuple(stage((size, mix), base=16, per_slot=4) for size in sizes)


# The paper's traffic: sparse and intense stretches take turns, here twice in a block. (Share of the block, load.)
ALTERNATING = ((0.3, 0.15), (0.2, 0.8)) * 2
GROWING = (1.0, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True)
class TrackRecipe:
    """Recipe for the blocks of a named workload.

    stages: of a closed loop; empty: requests of `mix` arrive at the loads of ALTERNATING. block_s: seconds that a block of
    arrivals takes, and that one of stages takes roughly. burstiness: coefficients of variation of the gaps between arrivals,
    gamma distributed, one a block, in turn; 1 is Poisson, more is burstier.
    """

    summary: str
    block_s: float
    stages: tuple[Stage, ...] = ()
    mix: Mix = MIXED
    burstiness: tuple[float, ...] = (1.0,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of requests under way in the stages, in rising order."""
        return tuple(sorted({one.at_once for one in self.stages}))


TRACKS: dict[str, TrackRecipe] = {
    "mixed": TrackRecipe(
        "all kinds of requests arrive; sparse and intense stretches take turns, burstiness grows",
        10.0,
        burstiness=GROWING,
    ),
    "closed": TrackRecipe("all kinds of requests, 16 to 1 at a time", 25.0, falling(MIXED, 16, 8, 4, 2, 1)),
    "closed-copying": TrackRecipe(
        "edits, extraction and quotes, 16 to 1 at a time", 25.0, falling(COPYING, 16, 8, 4, 2, 1)
    ),
    "rollout": TrackRecipe(
        "64 requests at once whose outputs have a long tail; the time until the last one ends counts",
        8.0,
        (Stage(((64, LONG_TAILED),), 64, streamed=False),),
    ),
    "agents": TrackRecipe(
        "1 to 4 agents quote files and tool output, and a chat load next to them swells to 16 and falls",
        20.0,
        tuple(
            stage(*((number, mix) for number, mix in ((agents, QUOTING), (chats, FRESH)) if number))
            for agents, chats in ((1, 0), (2, 2), (4, 0), (3, 8), (2, 16), (4, 8), (1, 3), (2, 0), (1, 1))
        ),
    ),
    "day": TrackRecipe(
        "1 to 32 requests at a time and back, of text that repeats itself for a while and then does not",
        30.0,
        tuple(
            stage((size, mix))
            for mix, sizes in (
                *((COPYING, (1, 2)), (FRESH, (4, 8)), (COPYING, (16, 32))),
                *((FRESH, (32, 16)), (COPYING, (8, 4)), (FRESH, (2, 1))),
            )
            for size in sizes
        ),
    ),
}


def recipe_of(track: str) -> TrackRecipe:
    """Recipe by name. Raises ValueError if the name is unknown."""
    if track not in TRACKS:
        raise ValueError(f"track {track!r} is unknown: use {', '.join(TRACKS)}")
    return TRACKS[track]


PROMPT_TOKENS = {
    "code": (24, 40, 64, 96),
    "prose": (24, 40, 64, 96),
    "edit": (96, 128, 160),
    "extract": (96, 128, 192),
    "quote": (96, 128, 160),
}
# A conversation's next turn sends all earlier turns again, and as many new tokens.
FIRST_TURN_TOKENS, TURN_TOKENS, MAX_TURNS, CONTINUED_SHARE = 64, 64, 4, 0.6
MAX_ARRIVALS = 100_000
MAX_DRAWS = 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. The same prompt_seed, kind and prompt_tokens give the same prompt.

    Turns of one conversation share the seed, and each prompt begins with the previous one. prompt_tokens: 0 if the text
    decides. output_tokens: the maximum if ends_itself, which means that the model ends its answer. at_once: in a closed
    loop, the request is sent when fewer than this many are under way, and at_s is 0; None: it is sent at at_s.
    """

    at_s: float
    kind: str
    prompt_seed: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    sampling_seed: int = 0
    ends_itself: bool = False
    at_once: int | None = None
    streamed: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """Arrivals in the order in which they are sent. number: of its round. duration_s: nominal for a closed loop."""

    track: str
    number: int
    duration_s: float
    arrivals: tuple[Arrival, ...]


def make_block(
    track: str,
    capacity_tokens_per_s: float,
    number: int = 0,
    seed: int = 0,
    duration_s: float | None = None,
    chat: bool = False,
) -> Block:
    """Draw a block. duration_s scales all stretches and stages of the recipe. chat: for a chat model.

    Raises ValueError for an unknown workload, a capacity or duration that is not positive, or a block without arrivals.
    """
    recipe = recipe_of(track)
    seconds = recipe.block_s if duration_s is None else duration_s
    for what, value in (("capacity", capacity_tokens_per_s), ("duration", seconds)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the {what} of a track is {value:g}; it must be above 0")
    if recipe.stages:
        rng, turns = np.random.default_rng([seed, number]), Conversations(np.random.default_rng([seed, number, 1]))
        drawn = [draw_stage(rng, one, seconds / recipe.block_s, chat, turns) for one in recipe.stages]
        return Block(track, number, seconds, tuple(arrival for stretch in drawn for arrival in stretch))
    rate = capacity_tokens_per_s / (MEAN_CHAT_TOKENS if chat else recipe.mix.mean_tokens)
    expected = rate * seconds * sum(share * load for share, load in ALTERNATING)
    if expected > MAX_ARRIVALS:
        raise ValueError(f"a block has about {expected:.3g} arrivals: use a smaller --capacity or --block-s")
    # Bursty traffic may leave a short block empty: then it is drawn again.
    for attempt in range(MAX_DRAWS):
        rng = np.random.default_rng([seed, number, attempt])
        if arrivals := draw_arrivals(rng, recipe, rate, seconds, number, chat):
            return Block(track, number, seconds, tuple(arrivals))
    raise ValueError(f"no request arrives in {seconds:g} s at this load: use a longer --block-s")


def draw_stage(rng: np.random.Generator, stage: Stage, scale: float, chat: bool, turns: Conversations) -> list[Arrival]:
    """The requests of a stage in random order. scale: times their number in the recipe."""
    wanted = min(MAX_ARRIVALS, max(1, round(stage.num_requests * scale)))
    shares = np.cumsum([number / stage.at_once for number, _ in stage.mixes])
    counts = np.diff(np.round(wanted * shares).astype(int), prepend=0)
    found = [
        replace(arrival, at_once=stage.at_once, streamed=stage.streamed)
        for (_, mix), count in zip(stage.mixes, counts, strict=True)
        for arrival in draw_requests(rng, np.zeros(count), mix, chat, turns)
    ]
    return [found[place] for place in rng.permutation(len(found))]


def draw_arrivals(
    rng: np.random.Generator, recipe: TrackRecipe, rate: float, seconds: float, number: int, chat: bool
) -> list[Arrival]:
    """Arrivals of an open loop. rate: requests per second at a load of 1."""
    arrivals: list[Arrival] = []
    start, turns, cv = 0.0, Conversations(rng), recipe.burstiness[number % len(recipe.burstiness)]
    for share, load in ALTERNATING:
        times = start + arrival_times(rng, rate * load, share * seconds, cv)
        arrivals.extend(draw_requests(rng, times, recipe.mix, chat, turns))
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
    rng: np.random.Generator, times: Sequence[float] | np.ndarray, mix: Mix, chat: bool, turns: Conversations
) -> list[Arrival]:
    """One request for each of these times. turns: open conversations."""
    names, shares = zip(*(mix.chat_kinds if chat else mix.kinds), strict=True)
    kinds = rng.choice(names, size=len(times), p=shares)
    temperatures = rng.choice(mix.temperatures, size=len(times))
    mean_log = math.log(mix.mean_tokens) - mix.sigma**2 / 2
    lengths = rng.lognormal(mean_log, mix.sigma, size=len(times))
    outputs = np.clip(lengths, SHORTEST_OUTPUT, mix.longest).astype(int)
    found = []
    for at_s, kind, output, temperature in zip(times, kinds, outputs, temperatures, strict=True):
        seed, tokens = draw_seed(rng), mix.prompt_scale * int(rng.choice(PROMPT_TOKENS.get(kind, (0,))))
        if kind == "chat":
            seed, tokens = turns.next()
        arrival = Arrival(
            round(float(at_s), 6), str(kind), seed, tokens, int(output), float(temperature), draw_seed(rng)
        )
        if chat:
            arrival = replace(arrival, output_tokens=LONGEST_CHAT_TOKENS, ends_itself=True)
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
