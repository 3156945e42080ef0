"""What `scripts/gpu_check` found on a GPU, as tables: lengths beside the paper's, and passes beside their floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speclen.bench.comparison.paper_table import PAPER_GAINS, PAPER_LENGTHS, row_of, times

# Models, rows and queries of those that were timed.
SHOWN_PASSES = (("target", 1, 1), ("draft", 1, 1), ("target", 32, 1), ("draft", 32, 1), ("target", 32, 9))
SHOWN_PROMPTS = (10, 250)


def lengths_table(path: Path) -> str:
    """Best length and gain by batch size beside the paper's, and transformers' own generation."""
    if not path.exists():
        return "Nothing has been measured yet."
    document = json.loads(path.read_text("utf-8"))
    rates: dict[int, dict[int, float]] = {}
    for cell in document["cells"]:
        rates.setdefault(cell["batch_size"], {})[cell["speculation_length"]] = cell["tokens_per_s"]
    generate = {row["batch_size"]: row["tokens_per_s"] for row in document["baselines"] if row["what"] == "generate"}
    best = {size: max(row, key=row.__getitem__) for size, row in rates.items()}
    lines = [f"| batch size | {' | '.join(map(str, rates))} |", "|---|" + "---|" * len(rates)]
    lines.append(row_of("best length", [best[size] for size in rates]))
    lines.append(row_of("best length, paper", [PAPER_LENGTHS.get(size, "") for size in rates]))
    lines.append(row_of("faster than length 0", [times(rates[size][best[size]] / rates[size][0]) for size in rates]))
    lines.append(row_of("faster than length 0, paper", [times(PAPER_GAINS.get(size)) for size in rates]))
    lines.append(row_of("tokens/s", [f"{rates[size][best[size]]:,.0f}" for size in rates]))
    lines.append(row_of("tokens/s, length 0", [f"{rates[size][0]:,.0f}" for size in rates]))
    lines.append(row_of("tokens/s, transformers' `generate`", [f"{generate[size]:,.0f}" for size in rates]))
    sizes = document["sizes"]
    shorter = f"transformers generated {sizes['baseline_tokens']} tokens each, eagerly"
    return "\n".join([*lines, "", f"`{sizes['target']}` with `{sizes['draft']}`, {place(document)}; {shorter}."])


def passes_table(plain: Path, fused: Path) -> str:
    """Milliseconds of passes: what the memory's bandwidth allows, with torch's kernels alone, and with ours between them."""
    if not (plain.exists() and fused.exists()):
        return "Nothing has been measured yet."
    before, after = (json.loads(path.read_text("utf-8")) for path in (plain, fused))
    lines = ["| pass, ms | read from memory alone | torch's kernels | ours between the products |", "|---|---|---|---|"]
    for old, new in zip(before["passes"], after["passes"], strict=True):
        name = f"{old['model']}, {old['batch_size']} x {old['num_queries']} tokens"
        lines.append(row_of(name, [f"{1e3 * each:.2f}" for each in (old["floor_s"], old["seconds"], new["seconds"])]))
    return "\n".join([*lines, "", f"The first two {place(before)}; the last at commit `{after['commit']}`."])


def attention_table(path: Path) -> str:
    """Milliseconds of passes by how much of their rows attention reads, and of prompts, recorded and not."""
    if not path.exists():
        return "Nothing has been measured yet."
    document = json.loads(path.read_text("utf-8"))
    lines = [
        "| pass, ms | rows of | reading what the longest holds | what each holds | ratio |",
        "|---|---|---|---|---|",
    ]
    for one in document["attention"]:
        if (one["model"], one["batch_size"], one["num_queries"]) in SHOWN_PASSES:
            before, after = one["longest_row_read_ms"], one["own_rows_read_ms"]
            longest = one["longest_row"]
            spread = f"{longest} tokens" if one["rows"] == "all as long" else f"20 to {longest} tokens"
            shape = f"{one['model']}, {one['batch_size']} x {one['num_queries']} tokens"
            lines.append(row_of(shape, [spread, f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"]))
    lines += ["", "| prompt, ms | kernel by kernel | recorded in blocks |", "|---|---|---|"]
    for one in document["prompts"]:
        if one["num_tokens"] in SHOWN_PROMPTS:
            name = f"{one['model']}, {one['num_tokens']} tokens after {one['held']}"
            lines.append(row_of(name, [f"{one['plain_ms']:.1f}", f"{one['recorded_ms']:.1f}"]))
    commits = document["commit"]
    return "\n".join(
        [
            *lines,
            "",
            f"On one {device_of(document)}; commits `{commits['longest_row_read_ms']}`, then "
            f"`{commits['prompts']}`; [all of them](gpu/attention.json).",
        ]
    )


def device_of(document: dict[str, Any]) -> str:
    """Its name, without its kind."""
    return str(document["machine"]["device"].partition(":")[2])


def place(document: dict[str, Any]) -> str:
    """Where and with what program."""
    machine = document["machine"]
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"on one {device_of(document)} in bfloat16 ({versions}; commit `{document['commit']}`)"
