"""The paper's experiments as a table, from the profiles that `scripts/paper_experiments.py lengths` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# arXiv 2310.18813: the table of its prototype, and its gains over no speculation at batch sizes 1 and 32.
PAPER_LENGTHS = {1: 7, 2: 6, 4: 4, 8: 4, 16: 3, 32: 1}
PAPER_GAINS = {1: 2.73, 32: 1.31}


def table(path: Path) -> str:
    """Best length and gain by batch size at every temperature, beside the paper's; then the fitted model."""
    if not path.exists():
        return "Nothing has been measured yet."
    documents: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8"))
    sizes = sorted({row["batch_size"] for document in documents.values() for row in document["best"]})
    lines = [f"| batch size | {' | '.join(map(str, sizes))} |", "|---|" + "---|" * len(sizes)]
    for title, document in documents.items():
        rows = {row["batch_size"]: row for row in document["best"]}
        lines.append(row_of(f"best length, {title}", [rows[size]["best_length"] for size in sizes]))
        lines.append(
            row_of(f"faster than length 0, {title}", [times(rows[size]["gain_over_length_0"]) for size in sizes])
        )
        lines.append(row_of(f"the paper's bound, {title}", [number(rows[size]["paper_ceiling"]) for size in sizes]))
    lines.append(row_of("best length, paper", [PAPER_LENGTHS.get(size, "") for size in sizes]))
    lines.append(row_of("faster than length 0, paper", [times(PAPER_GAINS.get(size)) for size in sizes]))
    return "\n".join([*lines, "", *(model_of(title, document) for title, document in documents.items())])


def row_of(heading: str, cells: list[Any]) -> str:
    return f"| {heading} | {' | '.join(str(cell) for cell in cells)} |"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}"


def model_of(title: str, document: dict[str, Any]) -> str:
    """One sentence about the fitted model."""
    model = document["paper_model"]
    if model is None:
        return f"- {title}: the paper's model cannot be fitted."
    worst = max((row["paper_excess"] or 0.0 for row in document["best"]), default=0.0)
    accepted, steps = 100 * model["accepted_error"], 100 * model["step_error"]
    return (
        f"- {title}: accepted tokens {model['c']:.2f} s^{model['gamma']:.2f} (within {accepted:.0f}%, root mean square), "
        f"step time {model['beta_ms']:.1f} ms + s A_b (within {steps:.0f}%); the length that the model chooses is up to "
        f"{100 * worst:.0f}% slower than the best measured one."
    )
