"""`speclen bench fleet`: how many workers controllers carry, how old their decisions are, and what that costs."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import typer

from speclen.bench.fleet.load import Load, load_of
from speclen.bench.fleet.quality import Quality, Setting, delay_ticks, play, window_ticks
from speclen.bench.fleet.staleness import Costs, Staleness, staleness
from speclen.bench.fleet.world import Fleet
from speclen.bench.service.controller import controller_process, machine_facts

LOADS = (100, 300, 500)  # workers that report while a controller's time is measured
STEPS_PER_S = 40.0
PROBED_S = 3.0  # simulated, to learn what a round of learning takes
SHORTEST_S = 0.25  # of a window
# Messages a second and core that are planned with, as the controller does: see thinning.py.
MESSAGES_PER_S = 5_000.0


@dataclass(frozen=True, slots=True)
class Ingest:
    """Of a controller: share of a core that it takes whatever comes, and seconds of one for each message."""

    fixed: float
    message_s: float
    loads: tuple[Load, ...]


def measured(window_s: float, seconds: float) -> Ingest:
    """The cost of real messages at real controllers, by a line through the loads."""
    loads = asyncio.run(_loads(window_s, seconds))
    messages, busy = np.array([(load.messages_per_s, load.busy) for load in loads]).T
    slope, fixed = np.polyfit(messages, busy, 1)
    return Ingest(max(float(fixed), 0.0), max(float(slope), 1e-6), tuple(loads))


async def _loads(window_s: float, seconds: float) -> list[Load]:
    loads = []
    for num_workers in LOADS:
        tell(f"a controller under {num_workers} workers")
        with controller_process("sqlite", True) as process:
            steps_each = round(STEPS_PER_S * window_s)
            loads.append(await load_of(process, num_workers, window_s, steps_each, seconds, 3.0))
    await asyncio.sleep(1.0)  # gRPC has word of the ended streams for this loop
    return loads


@dataclass(frozen=True, slots=True)
class Point:
    """A fleet of one size."""

    num_workers: int
    num_controllers: int
    window_s: float
    messages_per_s: float
    staleness: Staleness
    quality: Quality
    at_once: Quality | None

    @property
    def lost(self) -> float | None:
        """Goodput lost against one controller that sees everything at once, as a share."""
        return None if self.at_once is None else 1.0 - self.quality.goodput / self.at_once.goodput


def point(
    num_workers: int, num_controllers: int, ingest: Ingest, kinds: int, seconds: float, seed: int, compare: bool
) -> Point:
    """Simulate a fleet; compare: also under one controller that sees everything at once."""
    share = 1.0 - min(ingest.fixed, 0.5)  # of a core, that is left for what comes
    each = -(-num_workers // num_controllers)
    window_s = max(each / MESSAGES_PER_S, SHORTEST_S)
    tell(f"{num_workers} workers, {num_controllers} controllers")
    tried = play(Fleet(num_workers, kinds, PROBED_S, seed), Setting(num_controllers, window_ticks(window_s), 4), seed)
    costs = Costs(ingest.message_s / share, tried.round_s / share, tried.call_s / share)
    age = staleness(each, window_s, costs, seed=seed)
    fleet = Fleet(num_workers, kinds, seconds, seed)
    late = Setting(num_controllers, window_ticks(window_s), delay_ticks(age.after_s))
    quality = play(fleet, late, seed)
    if compare:
        tell(f"{num_workers} workers, one controller that sees everything at once")
    at_once = play(fleet, Setting(1, 1, 0), seed) if compare else None
    return Point(num_workers, num_controllers, window_s, each / window_s, age, quality, at_once)


def fleet(
    workers: int = typer.Option(10_000, min=100, max=1_000_000, help="Workers of the largest fleet."),
    controllers: int = typer.Option(4, min=1, max=256, help="Controllers of the largest fleet."),
    kinds: int = typer.Option(4, min=1, max=64, help="Kinds of machine."),
    seconds: float = typer.Option(30.0, min=6.0, help="Simulated seconds; prompts and speed change once each."),
    load_seconds: float = typer.Option(5.0, min=1.0, help="Length of each measurement of a real controller."),
    message_us: float = typer.Option(0.0, min=0.0, help="Cost of a message; 0: measured at real controllers."),
    compare: bool = typer.Option(True, help="Play each fleet also under one controller that sees everything at once."),
    seed: int = typer.Option(0, min=0, help="Seed of the simulated fleet."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Simulate fleets up to so many workers, with the real estimator and the measured cost of real messages.

    Example: speclen bench fleet --workers 10000 --controllers 4
    """
    ingest = Ingest(0.0, 1e-6 * message_us, ()) if message_us else measured(0.5, load_seconds)
    sizes = [(max(workers // 100, 1), 1), (workers // 10, max(controllers // 4, 1)), (workers, controllers)]
    points = [point(size, many, ingest, kinds, seconds, seed, compare) for size, many in sizes]
    document = {"machine": machine_facts(), "ingest": asdict(ingest), "points": [_as_dict(each) for each in points]}
    print(json.dumps(document, indent=2) if as_json else as_text(ingest, points))


def tell(what: str) -> None:
    """Progress, for people."""
    print(what, file=sys.stderr, flush=True)


def _as_dict(each: Point) -> dict[str, Any]:
    return {**asdict(each), "lost": each.lost}


def as_text(ingest: Ingest, points: list[Point]) -> str:
    """A table for people."""
    lines = [
        f"a message costs {1e6 * ingest.message_s:.0f} us of a core, a controller {ingest.fixed:.0%} of one besides",
        f"{'workers':>8} {'controllers':>11} {'window s':>8} {'messages/s':>10} {'busy':>6} "
        f"{'stale p50':>9} {'p99 s':>6} {'goodput':>8} {'at once':>8} {'lost':>7}",
    ]
    for each in points:
        at_once = "" if each.at_once is None else f"{each.at_once.goodput:.4f}"
        lost, age, goodput = "" if each.lost is None else f"{each.lost:.2%}", each.staleness, each.quality.goodput
        lines.append(
            f"{each.num_workers:>8,} {each.num_controllers:>11} {each.window_s:>8.2f} {each.messages_per_s:>10,.0f} "
            f"{age.busy:>6.0%} {age.p50_s:>9.2f} {age.p99_s:>6.2f} {goodput:>8.4f} {at_once:>8} {lost:>7}"
        )
    lines.append(
        "messages/s, busy: of each controller. goodput: of a clairvoyant's; at once: of one that sees everything at once"
    )
    return "\n".join(lines)
