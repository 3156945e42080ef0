"""Saved tracks: what one comparison served, to be served again."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from speclen.bench.serving.tracks import Arrival, Track

FORMAT = "speclen-track-1"


def save_track(track: Track, path: Path) -> None:
    content = dataclasses.asdict(track) | {"format": FORMAT}
    content["arrivals"] = [dataclasses.astuple(arrival) for arrival in track.arrivals]
    path.write_text(json.dumps(content) + "\n", "utf-8")


def load_track(path: Path) -> Track:
    """A saved track, to be replayed as it is. Raises ValueError naming the file."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        arrivals = tuple(checked(Arrival(*fields)) for fields in content.pop("arrivals"))
        track = Track(arrivals=arrivals, **content)
    except OSError as error:
        raise ValueError(f"cannot read the track {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a saved track: write one with --save-track ({error})") from error
    if not in_order(arrivals):
        raise ValueError(f"{path}: the arrivals are not in order of time")
    return track


def checked(arrival: Arrival) -> Arrival:
    if not (arrival.at_s >= 0 and arrival.prompt_tokens >= 1 and arrival.output_tokens >= 1):
        raise ValueError(f"an arrival is out of range: {arrival}")
    return arrival


def in_order(arrivals: Sequence[Arrival]) -> bool:
    return all(a.at_s <= b.at_s for a, b in itertools.pairwise(arrivals))
