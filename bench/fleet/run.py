"""`speclen bench fleet`: how many workers controllers carry, how old their decisions are, and what that costs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import typer

from speclen.bench.fleet.crowd import Crowd, crowd
from speclen.bench.fleet.load import Load, load_of
from speclen.bench.fleet.quality import Quality, Setting, delay_ticks, play, window_ticks
from speclen.bench.fleet.staleness import Costs, Staleness, Workload, staleness
from speclen.bench.fleet.world import Fleet
from speclen.bench.service.controller import brackets, controller_process, machine_facts
from speclen.bench.spread import spread
from speclen.console.errors import UserError
from speclen.controller.estimator.contexts.workers import MOST_WORKERS
from speclen.controller.service.thinning import Windows

REPEATS, TRIES = 3, 3  # of a measurement of a real controller
MOST_STREAMS = 4096  # that a controller admits
PROBED_S = 9.0  # simulated, to learn what a round of learning takes


@dataclass(frozen=True, slots=True)
class Sent:
    """What the workers of a measurement send: so many of them, so many messages of so many steps each.

    num_warm: messages of each, of those, that are sent before the clock starts.
    """

    num_workers: int
    num_messages: int
    steps_each: int
    added_up: bool
    num_warm: int = 0


# Short windows, learned from; long ones, mostly counted alone once the controller has chosen who is learned from; steps by
# themselves as a worker flushes them; empty messages, each answered: of these two messages one is like that which tells a
# worker of a table.
KINDS = {
    "windows": Sent(512, 20, 12, True, num_warm=3),
    "rest": Sent(2048, 5, 104, True, num_warm=2),
    "single": Sent(192, 20, 8, False, num_warm=3),
    "empty": Sent(1024, 5, 0, False),
}


@dataclass(frozen=True, slots=True)
class Ingest:
    """What real controllers took, by kind of message, and seconds of a core: for a window that is learned from, for one that
    is not, to tell a worker of a table. crowds: of as many workers as each controller of the fleet has.
    """

    message_s: float
    rest_s: float
    tell_s: float
    loads: dict[str, list[Load]] = field(default_factory=dict)
    crowds: list[Crowd] = field(default_factory=list)


async def measured(num_workers: int) -> Ingest:
    """The cost of real messages at real controllers, medians of interleaved repeats; and so many workers at one."""
    loads: dict[str, list[Load]] = {kind: [] for kind in KINDS}
    for repeat in range(REPEATS):
        for kind, done in loads.items():
            tell(f"a real controller, repeat {repeat + 1} of {REPEATS}, {kind}")
            done.append(await one_load(KINDS[kind]))
    crowds = []
    for repeat in range(REPEATS):
        tell(f"a real controller of {num_workers} workers, repeat {repeat + 1} of {REPEATS}")
        with controller_process("sqlite", True) as process:
            crowds.append(await crowd(process, num_workers))
    await asyncio.sleep(1.0)  # gRPC has word of the ended streams for this loop
    cost = {kind: float(np.median([load.message_s for load in done])) for kind, done in loads.items()}
    return Ingest(cost["windows"], cost["rest"], cost["empty"] / 2, loads, crowds)


async def one_load(sent: Sent) -> Load:
    """A measurement; again where a call is lost, as happens on a machine with much else to do."""
    for _ in range(TRIES - 1):
        with controller_process("sqlite", True) as process:
            try:
                return await load_of(process, *astuple(sent))
            except* grpc.RpcError as errors:
                tell(f"again, since a call was lost: {errors.exceptions[0]!r}"[:200])
    with controller_process("sqlite", True) as process:
        return await load_of(process, *astuple(sent))


@dataclass(frozen=True, slots=True)
class Point:
    """A fleet of one size. num_fresh: workers that are learned from; window_s, rest_s: windows of these and of the rest."""

    num_workers: int
    num_controllers: int
    num_fresh: int
    window_s: float
    rest_s: float
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
    load, share = load_of_one(num_workers, num_controllers, kinds)
    tell(f"{num_workers} workers, {num_controllers} controllers")
    ticks, rest_ticks = window_ticks(load.window_s), window_ticks(load.rest_s)
    tried = play(Fleet(num_workers, kinds, PROBED_S, seed), Setting(num_controllers, ticks, 4, share, rest_ticks), seed)
    learning = tried.round_s, tried.call_s, ingest.tell_s, tried.urgent_per_s
    costs = Costs(ingest.message_s, ingest.rest_s, *learning)
    age = staleness(load, costs, seed=seed)
    fleet = Fleet(num_workers, kinds, seconds, seed)
    quality = play(fleet, Setting(num_controllers, ticks, delay_ticks(age.usual_s), share, rest_ticks), seed)
    if compare:
        tell(f"{num_workers} workers, one controller that sees everything at once")
    at_once = play(fleet, Setting(1, 1, 0), seed) if compare else None
    windows = load.window_s, load.rest_s, load.messages_per_s
    return Point(num_workers, num_controllers, load.num_fresh * num_controllers, *windows, age, quality, at_once)


def load_of_one(num_workers: int, num_controllers: int, kinds: int) -> tuple[Workload, float]:
    """What a controller of the fleet gets, and the share of the workers not told apart that it learns from."""
    each = -(-num_workers // num_controllers)
    num_apart = min(each, MOST_WORKERS * max(1, kinds // num_controllers))
    windows = Windows.of_fleet(each, num_apart)
    num_fresh = num_apart + round(windows.share * (each - num_apart))
    return Workload(each, num_fresh, windows.window_s, windows.rest_s or windows.window_s), windows.share


def fleet(
    workers: int = typer.Option(10_000, min=100, max=1_000_000, help="Workers of the largest fleet."),
    controllers: int = typer.Option(4, min=1, max=256, help="Controllers, a core each, of the largest fleet."),
    kinds: int = typer.Option(4, min=1, max=64, help="Kinds of machine."),
    seconds: float = typer.Option(30.0, min=6.0, help="Simulated seconds; prompts and speed change once each."),
    costs: Path | None = typer.Option(None, help="Earlier output, whose measured costs are taken."),
    compare: bool = typer.Option(True, help="Play each fleet also under one controller that sees everything at once."),
    seed: int = typer.Option(0, min=0, help="Seed of the simulated fleet."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Simulate fleets up to so many workers, with the real estimator and the measured cost of real messages.

    Example: speclen bench fleet --workers 10000 --controllers 4
    """
    ingest = asyncio.run(measured(min(-(-workers // controllers), MOST_STREAMS))) if costs is None else kept(costs)
    sizes = [(max(workers // 100, 1), 1), (workers // 10, max(controllers // 4, 1)), (workers, controllers)]
    points = [point(size, many, ingest, kinds, seconds, seed, compare) for size, many in sizes]
    document = {"machine": machine_facts(), "ingest": asdict(ingest), "points": [_as_dict(each) for each in points]}
    print(json.dumps(document, indent=2) if as_json else as_text(ingest, points))


def kept(path: Path) -> Ingest:
    """The costs that an earlier run measured. Raises UserError for a file without any."""
    try:
        told = json.loads(path.read_text())["ingest"]
        return Ingest(float(told["message_s"]), float(told["rest_s"]), float(told["tell_s"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--costs {path} is no output of `speclen bench fleet --json`: {error!r}") from error


def tell(what: str) -> None:
    """Progress, for people."""
    print(what, file=sys.stderr, flush=True)


def _as_dict(each: Point) -> dict[str, Any]:
    return {**asdict(each), "lost": each.lost}


def as_line(what: str, loads: Sequence[Load]) -> str:
    """What was measured of a real controller."""
    message_us = spread([1e6 * load.message_s for load in loads])
    steps = spread([load.steps_per_core_s for load in loads])
    return f"{what}: {brackets(message_us, '{:.0f}')} us a message, {brackets(steps, '{:,.0f}')} steps a core-second"


def as_text(ingest: Ingest, points: list[Point]) -> str:
    """A table for people."""
    lines = [
        *(as_line(kind, loads) for kind, loads in ingest.loads.items()),
        *(
            f"{each.num_workers:,} workers at a real controller: {each.messages_per_s:,.0f} messages and "
            f"{each.steps_per_s:,.0f} steps a second take {each.busy:.0%} of a core; a call beside them takes "
            f"{1e3 * each.call_p50_s:.0f} ms, {1e3 * each.call_p99_s:.0f} at the 99th percentile"
            for each in ingest.crowds
        ),
        f"{'workers':>8} {'controllers':>11} {'learned from':>12} {'window s':>8} {'others s':>8} {'messages/s':>10} "
        f"{'busy':>6} {'stale p50':>9} {'p99 s':>6} {'goodput':>8} {'at once':>8} {'lost':>7}",
    ]
    for each in points:
        at_once = "" if each.at_once is None else f"{each.at_once.goodput:.4f}"
        lost, age, goodput = "" if each.lost is None else f"{each.lost:.2%}", each.staleness, each.quality.goodput
        lines.append(
            f"{each.num_workers:>8,} {each.num_controllers:>11} {each.num_fresh:>12,} {each.window_s:>8.2f} "
            f"{each.rest_s:>8.2f} {each.messages_per_s:>10,.0f} "
            f"{age.busy:>6.0%} {age.p50_s:>9.2f} {age.p99_s:>6.2f} {goodput:>8.4f} {at_once:>8} {lost:>7}"
        )
    lines.append(
        "messages/s, busy: of each controller. goodput: of a clairvoyant's; at once: of one that sees everything at once"
    )
    return "\n".join(lines)
