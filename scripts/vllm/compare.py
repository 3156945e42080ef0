"""Tokens/s of vLLM with lengths from a controller, with one length, and with its own table. Interleaved and repeated.

The server with speclen stays up: what it follows is changed by the controller that answers at its address.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from load import Block, closed_load
from servers import Server, controller

from speclen.bench.findings import Report

LEVELS = (1, 4, 16)
ADAPTIVE, FIXED, OWN = "adaptive", ("fixed:1", "fixed:3", "fixed:5"), "vLLM's own table"
MODES = (ADAPTIVE, *FIXED, OWN)
SETTLE_S = 30.0  # at most, until the server has found a controller that came back


def measure(
    report: Report,
    folder: Path,
    port: int,
    steered: Server,
    own: Server,
    prompts: Sequence[str],
    block_s: float,
    rounds: int,
) -> None:
    """Every mode at every level in every round; medians over rounds, and ratios within them."""
    found: dict[tuple[str, int], list[Block]] = {}
    for number in range(rounds):
        order = MODES if number % 2 == 0 else tuple(reversed(MODES))
        for mode in order:
            before = num_joins(steered)
            with nullcontext() if mode == OWN else controller(folder, port, mode):
                server = own if mode == OWN else steered
                if mode != OWN:
                    wait_until_joined(steered, before)
                for level in LEVELS:
                    found.setdefault((mode, level), []).append(closed_load(server.address, prompts, level, block_s))
    show(report, found, rounds, block_s)


def num_joins(server: Server) -> int:
    return len(server.log_lines("joined the controller"))


def wait_until_joined(server: Server, before: int) -> None:
    """Wait until the server says that it has joined the controller that was started just now."""
    deadline = time.monotonic() + SETTLE_S
    while num_joins(server) == before:
        if time.monotonic() > deadline:
            raise RuntimeError(f"vLLM did not join within {SETTLE_S:g} s: see {server.log}")
        time.sleep(0.1)


def show(report: Report, found: dict[tuple[str, int], list[Block]], rounds: int, block_s: float) -> None:
    report.say("", "## Tokens/s", "")
    report.say(f"Medians of {rounds} interleaved rounds of {block_s:g} s a block; in brackets least and most.", "")
    rows = []
    for mode in MODES:
        speeds = [[block.tokens_per_s for block in found[mode, level]] for level in LEVELS]
        rows.append([mode, *(f"{statistics.median(each):.0f} ({min(each):.0f}–{max(each):.0f})" for each in speeds)])
    report.table(["lengths", *(f"{level} at once" for level in LEVELS)], rows)
    report.say("", "Mean latency of a request over all blocks, and adaptive against the others round by round:", "")
    means = {mode: latencies(found, mode, rounds) for mode in MODES}
    rows = []
    for mode in MODES:
        ratios = [ours / theirs for ours, theirs in zip(means[ADAPTIVE], means[mode], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"
        rows.append([mode, f"{statistics.mean(means[mode]):.3f}", spread if mode != ADAPTIVE else "1"])
    report.table(["lengths", "latency, s", "adaptive / this"], rows)


def latencies(found: dict[tuple[str, int], list[Block]], mode: str, rounds: int) -> list[float]:
    """By round, the mean over levels of the mean latency: every level weighs the same."""
    return [
        statistics.mean(statistics.mean(found[mode, level][number].latencies_s) for level in LEVELS)
        for number in range(rounds)
    ]
