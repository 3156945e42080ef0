"""Results of `speclen bench step`: a line per engine, batch size and length, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from speclen.bench.engine.bandwidth import bytes_per_pass
from speclen.bench.engine.run import TimedStep
from speclen.bench.spread import Spread, ratio, spread


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to time: an engine at a length, `generate`, or assisted generation at a length (None: its default)."""

    kind: str  # of an engine its backend, else "generate" or "assisted"
    batch_size: int
    length: int | None = None

    def __str__(self) -> str:
        length = "" if self.kind == "generate" else f", length {'default' if self.length is None else self.length}"
        return self.kind + length

    @property
    def is_engine(self) -> bool:
        return self.kind not in ("generate", "assisted")


def cell(work: Work, rates: list[float], steps: list[TimedStep]) -> dict[str, Any]:
    """Throughput over the repeats, and mean step time with its parts over all steps at full batch size."""
    row: dict[str, Any] = {
        "backend": work.kind,
        "batch_size": work.batch_size,
        "speculation_length": work.length,
        "tokens_per_s": asdict(spread(rates)),
        "num_steps": len(steps),
    }
    if not steps:
        return row
    rows = sum(timed.record.batch_size for timed in steps)
    accepted = sum(j * count for timed in steps for j, count in enumerate(timed.record.accepted_histogram))
    row["tokens_per_step"] = 1 + accepted / rows
    row["step_ms"] = 1e3 * mean(steps, lambda timed: timed.record.latency_s)
    # What a server gives that replaces finished rows; tokens_per_s above also has the tail in which rows wait for the
    # slowest one of a fixed set of prompts.
    row["full_batch_tokens_per_s"] = 1e3 * work.batch_size * row["tokens_per_step"] / row["step_ms"]
    if steps[0].draft_s is not None:
        row["draft_ms"] = 1e3 * mean(steps, lambda timed: timed.draft_s or 0.0)
        row["verify_ms"] = 1e3 * mean(steps, lambda timed: timed.verify_s or 0.0)
        row["verify_median_ms"] = 1e3 * statistics.median(timed.verify_s or 0.0 for timed in steps)
        row["other_ms"] = row["step_ms"] - row["draft_ms"] - row["verify_ms"]
    return row


def mean(steps: list[TimedStep], value: Callable[[TimedStep], float]) -> float:
    return sum(value(timed) for timed in steps) / len(steps)


def ratios(rates: dict[Work, list[float]]) -> Iterator[tuple[str, Spread]]:
    """Ratios that the aims name: over generate and assisted generation, over length 0, and between backends."""
    for batch_size in sorted({work.batch_size for work in rates}):
        best: dict[str, list[float]] = {}
        for backend in dict.fromkeys(work.kind for work in rates if work.is_engine):
            ours = {w.length: v for w, v in rates.items() if (w.kind, w.batch_size) == (backend, batch_size)}
            best[backend] = yield from ratios_of(backend, batch_size, ours, rates)
        first, *others = best
        for other in others:
            yield f"best length, {other} / {first}, batch {batch_size}", ratio(best[other], best[first])


def ratios_of(
    backend: str, batch_size: int, ours: dict[int | None, list[float]], rates: dict[Work, list[float]]
) -> Generator[tuple[str, Spread], None, list[float]]:
    """Ratios of one engine at one batch size. ours: tokens per second by length. Returns those of the best length."""
    best = max(ours, key=lambda length: spread(ours[length]).median)
    if generated := rates.get(Work("generate", batch_size)):
        yield f"{backend}, length 0 / generate, batch {batch_size}", ratio(ours[0], generated)
    if best:
        yield f"{backend}, best length {best} / length 0, batch {batch_size}", ratio(ours[best], ours[0])
    assisted = [v for work, v in rates.items() if work.kind == "assisted" and work.batch_size == batch_size]
    if assisted:
        fastest = max(assisted, key=lambda values: spread(values).median)
        yield (
            f"{backend}, best length {best} / best assisted generation, batch {batch_size}",
            ratio(ours[best], fastest),
        )
    return ours[best]


def memory(target: Any, bandwidths: list[float], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Time of a target pass over one sequence beside the time of reading its weights. bandwidths: bytes/s."""
    num_bytes, per_s = bytes_per_pass(target), spread(bandwidths).median
    least_ms = 1e3 * num_bytes / per_s
    plain = [row for row in cells if (row["batch_size"], row["speculation_length"]) == (1, 0) and "verify_ms" in row]
    return {
        "read_gb_per_s": asdict(spread([value / 1e9 for value in bandwidths])),
        "weight_mb_per_pass": num_bytes / 1e6,
        "least_pass_ms": least_ms,
        "pass_over_least": {row["backend"]: row["verify_median_ms"] / least_ms for row in plain},
    }
