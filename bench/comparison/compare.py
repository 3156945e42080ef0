"""Runs contenders interleaved on one track (A B C A B C) and puts them in relation to each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from speclen.bench.comparison.stats import Interval, ratio_of_means, too_short
from speclen.bench.comparison.summary import RunSummary, summarise
from speclen.bench.serving.deployment import Contender
from speclen.bench.serving.run_track import TrackRun
from speclen.bench.serving.tracks import Track
from speclen.bench.serving.watch import reached_steps_at


@dataclass(frozen=True, slots=True)
class Ratio:
    """Mean latency of `contender` over that of `reference`, on requests that both finished; below 1: faster.

    num_left_out: counted requests that failed in either. interval: None when there is nothing to compare.
    """

    contender: str
    reference: str
    interval: Interval | None
    num_left_out: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of a track and what follows from them. from_s: requests that arrived earlier do not count."""

    track: Track
    contenders: tuple[str, ...]
    repeats: int
    from_s: float
    target_s_per_token: float | None
    runs: tuple[TrackRun, ...]
    summaries: tuple[RunSummary, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]

    def of(self, contender: str) -> list[RunSummary]:
        return [summary for summary in self.summaries if summary.contender == contender]

    def mean_latency_s(self, contender: str) -> float | None:
        """Mean over repeats of the mean latency; None when nothing finished in some repeat."""
        means = [summary.latency.mean for summary in self.of(contender) if summary.latency]
        return float(np.mean(means)) if len(means) == self.repeats else None


def run_all(
    contenders: Sequence[Contender], repeats: int, run_one: Callable[[Contender, int], TrackRun]
) -> list[TrackRun]:
    """A B C A B C: what drifts in the machine falls on all alike. Ctrl-C keeps the repeats that are complete."""
    complete: list[TrackRun] = []
    for repeat in range(repeats):
        try:
            complete += [run_one(contender, repeat) for contender in contenders]
        except KeyboardInterrupt:
            if not complete:
                raise
            break
    return complete


def compare_runs(
    track: Track,
    contenders: Sequence[Contender],
    runs: Sequence[TrackRun],
    target_s_per_token: float | None,
    planned: int | None = None,
) -> Comparison:
    """Summaries of all runs, and the ratio of every contender to every other. planned: repeats that were asked for."""
    names = tuple(contender.name for contender in contenders)
    repeats = 1 + max(run.repeat for run in runs)
    from_s, notes = counting_starts(track, contenders, runs)
    counted = track.counted(from_s)
    summaries = tuple(summarise(run, counted, from_s, target_s_per_token) for run in runs)
    if planned is not None and repeats < planned:
        notes.append(f"interrupted: {repeats} of {planned} repeats are complete, and only they are shown")
    if short := too_short(len(counted), repeats):
        notes.append(short)
    for summary in summaries:
        notes += [f"{summary.contender}, repeat {summary.repeat + 1}: {warning}" for warning in summary.warnings]
    pairs = itertools.permutations(names, 2)
    return Comparison(
        track=track,
        contenders=names,
        repeats=repeats,
        from_s=from_s,
        target_s_per_token=target_s_per_token,
        runs=tuple(runs),
        summaries=summaries,
        ratios=tuple(ratio(runs, counted, contender, reference) for contender, reference in pairs),
        notes=tuple(notes),
    )


def counting_starts(track: Track, contenders: Sequence[Contender], runs: Sequence[TrackRun]) -> tuple[float, list[str]]:
    """When counting starts, the same for all: after the warm-up, and after what a learning worker needs to settle."""
    if not track.settle_steps:
        return track.warm_up_s, []
    learning = {contender.name for contender in contenders if contender.learns}
    settled = [reached_steps_at(run.samples, track.settle_steps) for run in runs if run.contender in learning]
    if any(at_s is None for at_s in settled):
        return track.warm_up_s, [f"a run ended before its first {track.settle_steps} steps: use a longer --duration-s"]
    return max([track.warm_up_s, *(at_s for at_s in settled if at_s is not None)]), []


def ratio(runs: Sequence[TrackRun], counted: Sequence[int], contender: str, reference: str) -> Ratio:
    """Repeat by repeat, request by request."""
    by_key = {(run.contender, run.repeat): run for run in runs}
    numerators, denominators, at_s, left_out = [], [], [], 0
    for repeat in sorted({run.repeat for run in runs}):
        pairs = [
            (by_key[contender, repeat].outcomes[index], by_key[reference, repeat].outcomes[index]) for index in counted
        ]
        both = [(a, b) for a, b in pairs if not a.error and not b.error]
        left_out += len(pairs) - len(both)
        numerators.append(np.array([a.latency_s for a, _ in both]))
        denominators.append(np.array([b.latency_s for _, b in both]))
        at_s.append(np.array([a.at_s for a, _ in both]))
    enough = all(len(values) > 0 for values in numerators)
    interval = ratio_of_means(numerators, denominators, at_s) if enough else None
    return Ratio(contender, reference, interval, left_out)


def best_fixed(comparison: Comparison) -> str | None:
    """The fixed length with the least mean latency over all repeats, none counting as length 0; None without any."""
    fixed = [
        name for name in comparison.contenders if name == "none" or (name.startswith("fixed:") and "@" not in name)
    ]
    known = {name: mean for name in fixed if (mean := comparison.mean_latency_s(name)) is not None}
    return min(known, key=lambda name: known[name]) if known else None
