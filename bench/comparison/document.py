"""A comparison as a JSON file: every block, what follows from them, and what they were measured on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speclen.bench.comparison.rounds import Comparison, Ratio, from_rows, to_rows
from speclen.cli.support.files import write_whole

FORMAT = "speclen-serve-2"
# What must be alike in two runs whose rounds are put together.
ALIKE = (
    *(
        "commit",
        "track",
        "seed",
        "scale",
        "block_s",
        "capacity_tokens_per_s",
        "worker",
        "context",
        "profile",
        "profile_sha256",
        "policies",
    ),
    *("learn_s", "tables", "processor"),
)


def to_document(comparison: Comparison, facts: dict[str, Any]) -> dict[str, Any]:
    """facts: what the figures depend on; everything but single requests is in the result."""
    first, *others = comparison.policies
    cold = "cold" in comparison.policies
    return {
        "format": FORMAT,
        **facts,
        "policies": list(comparison.policies),
        "num_rounds": len(comparison.rounds),
        "resolution": comparison.resolution,
        "mean_latency_s": {name: comparison.mean_latency_s(name) for name in comparison.policies},
        "best_fixed": comparison.best_fixed(),
        "ratios": [as_json(comparison.ratio(first, name)) for name in others],
        "settled_ratios": [
            as_json(comparison.ratio("cold", n, settled=True)) for n in comparison.policies if n != "cold"
        ]
        if cold
        else [],
        "dropped": comparison.dropped,
        "notes": comparison.notes(),
        "errors": comparison.errors(),
        "rounds": to_rows(comparison.rounds),
    }


def as_json(ratio: Ratio) -> dict[str, Any]:
    return {**asdict(ratio), "interval": None if ratio.interval is None else asdict(ratio.interval)}


def write_document(document: dict[str, Any], path: Path) -> None:
    """Indented but for the rounds, of which each is a line. Raises UserError naming the file."""
    rounds = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in document["rounds"])
    head = json.dumps({key: value for key, value in document.items() if key != "rounds"}, indent=1)[:-2]
    write_whole(path, f'{head},\n "rounds": [\n  {rounds}\n ]\n}}')


def read_document(path: Path) -> dict[str, Any]:
    """Raises ValueError naming a file that is no comparison."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result of `speclen bench serve --out` ({error})") from error
    return dict(content)


def comparison_of(document: dict[str, Any]) -> Comparison:
    """The comparison that a document holds."""
    rounds, turns = from_rows(document["rounds"]), len(document.get("at_once", ())) or 1
    return Comparison(tuple(document["policies"]), document["resolution"], rounds, dict(document["dropped"]), turns)


def add_to(path: Path, comparison: Comparison, facts: dict[str, Any]) -> dict[str, Any]:
    """Put the rounds of an earlier run before these. Returns that run's document.

    Raises ValueError when it was measured otherwise: such rounds do not belong together.
    """
    before = read_document(path)
    check_alike(path, before, facts)
    comparison.rounds.extend(from_rows(before["rounds"]))
    comparison.dropped.update(before["dropped"])
    return before


def check_alike(path: Path, before: dict[str, Any], facts: dict[str, Any]) -> None:
    """facts: what is known so far of the run that is to go on. Raises ValueError for the first that is another."""
    for name in ALIKE:
        if name in facts and before.get(name) != (now := json.loads(json.dumps(facts[name]))):
            raise ValueError(
                f"{path} cannot be added to: its {name} is {before.get(name)!r}, not {now!r}; name another --out"
            )
