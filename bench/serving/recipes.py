"""Recipes of tracks: mixes of requests, and the tracks by name.

Rates are given as load, a share of the machine's capacity, so that a track means the same on a laptop and on a GPU.
Capacity: generated tokens per second at the best fixed length with every slot busy.
"""

from __future__ import annotations

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


MIXED = Mix(
    (("code", 0.3), ("edit", 0.2), ("extract", 0.1), ("quote", 0.05), ("prose", 0.1), ("chat", 0.25)), (0.0, 0.7, 1.0)
)
COPYING = Mix((("edit", 0.6), ("extract", 0.2), ("quote", 0.2)))
CHAT = Mix(tuple((kind, 1 / len(chat.KINDS)) for kind in chat.KINDS), (0.0, 0.7, 1.0), mean_tokens=128, most_tokens=384)

# The paper's traffic: sparse and intense stretches take turns, here twice in a block. (Share of the block, load.)
ALTERNATING = ((0.3, 0.15), (0.2, 0.8)) * 2
GROWING = (1.0, 2.0, 3.0, 4.0)
# The largest first: while it ends, it passes through all others, so that the round that is not counted warms all up.
FALLING = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class TrackRecipe:
    """Recipe for the blocks of a named track.

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
    "closed": TrackRecipe("mixed requests, always so many at a time", MIXED, 5.0, FALLING),
    "closed-wide": TrackRecipe("as closed, up to 32 at a time", MIXED, 5.0, (32, 16, 4, 1)),
    "closed-copying": TrackRecipe("edits, extraction and quotes, always so many at a time", COPYING, 5.0, FALLING),
    "chat": TrackRecipe("a chat model that ends its answers; sparse and intense stretches take turns", CHAT, 40.0),
    "closed-chat": TrackRecipe(
        "a chat model that ends its answers, always so many requests at a time", CHAT, 40.0, FALLING
    ),
}


def recipe_of(track: str) -> TrackRecipe:
    """Raises ValueError for a name that is no track's."""
    if track not in TRACKS:
        raise ValueError(f"track {track!r} is unknown: use {', '.join(TRACKS)}")
    return TRACKS[track]
