"""Recipes of tracks: mixes of requests, stretches of load, and the tracks by name.

Rates are given as load, a share of the machine's capacity, so that a track means the same on a laptop and on a GPU.
Capacity: generated tokens per second at the best fixed length with every slot busy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from speclen.bench.serving import chat

MEAN_OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of requests. kinds: with their shares, which add up to 1. temperatures: equally many of each.

    mean_tokens: of an answer. most_tokens: of an answer that the model ends by itself. None: the answer's length is drawn,
    and end tokens are ignored.
    """

    kinds: tuple[tuple[str, float], ...]
    temperatures: tuple[float, ...] = (0.0,)
    mean_tokens: float = MEAN_OUTPUT_TOKENS
    most_tokens: int | None = None


CODE = Mix((("code", 1.0),))
PROSE = Mix((("prose", 1.0),))
MIXED = Mix(
    (("code", 0.3), ("edit", 0.2), ("extract", 0.1), ("quote", 0.05), ("prose", 0.1), ("chat", 0.25)), (0.0, 0.7, 1.0)
)
COPYING = Mix((("edit", 0.6), ("extract", 0.2), ("quote", 0.2)))
SAMPLED = Mix((("code", 0.7), ("chat", 0.3)), (0.7, 1.0))
CHAT = Mix(tuple((kind, 1 / len(chat.KINDS)) for kind in chat.KINDS), (0.0, 0.7, 1.0), mean_tokens=128, most_tokens=384)


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
    """Recipe for the blocks of a named track.

    at_once: numbers of requests under way, one number a block, in turn. The next request is sent when one ends, and loads
    mean nothing. Empty: requests arrive at the segments' loads. burstiness: factors of the segments' cv, one a block, in
    turn. throttle_share: of the block, after which another process takes a core. cold: every block starts with an empty
    database for the policy `cold`. settle_steps: first steps of such a block, which are counted apart. wrong_profile:
    needs a profile that fits other traffic.
    """

    summary: str
    segments: tuple[Segment, ...]
    block_s: float = 10.0
    at_once: tuple[int, ...] = ()
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
# The largest first: while it ends, it passes through all others, so that the round that is not counted warms all up.
FALLING = (16, 8, 4, 2, 1)
SCENARIOS: dict[str, TrackRecipe] = {
    "mixed": TrackRecipe(
        "all kinds of requests at temperatures 0, 0.7 and 1; sparse and intense stretches take turns, burstiness grows",
        alternating(MIXED),
        burstiness=GROWING,
    ),
    "copying": TrackRecipe("edits, extraction and quotes, whose answers repeat their prompts", alternating(COPYING)),
    "time-varying": TrackRecipe(
        "the paper's: greedy completions, and a load that varies", alternating(CODE), burstiness=GROWING
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
    "closed": TrackRecipe("mixed requests, always so many at a time", (steady(1.0),), block_s=5.0, at_once=FALLING),
    "closed-wide": TrackRecipe("as closed, up to 32 at a time", (steady(1.0),), block_s=5.0, at_once=(32, 16, 4, 1)),
    "closed-copying": TrackRecipe(
        "edits, extraction and quotes, always so many at a time",
        (steady(1.0, mix=COPYING),),
        block_s=5.0,
        at_once=FALLING,
    ),
    "chat": TrackRecipe(
        "a chat model that ends its answers; sparse and intense stretches take turns", alternating(CHAT), block_s=40.0
    ),
    "closed-chat": TrackRecipe(
        "a chat model that ends its answers, always so many requests at a time",
        (steady(1.0, mix=CHAT),),
        block_s=40.0,
        at_once=FALLING,
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


MIXES = {"code": CODE, "prose": PROSE, "mixed": MIXED, "copying": COPYING, "sampled": SAMPLED, "chat": CHAT}


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
