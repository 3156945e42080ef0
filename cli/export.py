"""`speclen export`: the learned table as JSON, or the best lengths as a static table for another engine.

If an engine's format cannot express the table, the nearest one that it can is written, with a note.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from speclen.cli.support.database import DB_OPTION
from speclen.cli.support.output import UserError, user_errors, wrapped, write_whole
from speclen.cli.tables import CONTEXT, Row, rows_of

VLLM_KEY = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True, slots=True)
class Range:
    """A speculation length for batch sizes low to high."""

    low: int
    high: int
    length: int


Written = tuple[str, list[str]]  # the text, and one sentence for each thing that the format cannot express


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Merge neighbouring ranges of equal length. Raises ValueError if ranges overlap or leave gaps."""
    found: list[Range] = []
    end = 0
    for each in sorted(ranges, key=lambda each: each.low):
        if each.low != end + 1 or each.high < each.low:
            raise ValueError(f"batch size {end + 1} is in no range, or in two")
        end = each.high
        if found and found[-1].length == each.length:
            found[-1] = Range(found[-1].low, each.high, each.length)
        else:
            found.append(each)
    if not found:
        raise ValueError("there is no range")
    return found


def to_vllm(ranges: Sequence[Range]) -> Written:
    """Part of --speculative-config. Above the last range vLLM keeps using its length."""
    most = max(each.length for each in ranges)
    notes = (
        []
        if most
        else [
            "vLLM requires num_speculative_tokens of at least 1, so 1 is written although no length above 0 is in use"
        ]
    )
    table = [[each.low, each.high, each.length] for each in ranges]
    return json.dumps({"num_speculative_tokens": max(1, most), VLLM_KEY: table}), notes


def to_tensorrt_llm(ranges: Sequence[Range]) -> Written:
    """speculative_config as YAML. Keys are upper bounds; above the last one nothing is drafted."""
    most, notes = ranges[0].length, []
    if not most:
        raise ValueError(
            "TensorRT-LLM requires the longest draft at the smallest batch size, where this table drafts nothing: leave "
            "speculation off, or choose another format"
        )
    if any(each.length > most for each in ranges):
        notes.append(
            f"TensorRT-LLM allows no draft longer than that of the smallest batch size: longer ones are cut to {most}"
        )
    cut = merged(Range(each.low, each.high, min(each.length, most)) for each in ranges)
    notes.append(f"above batch size {cut[-1].high} TensorRT-LLM does not speculate")
    schedule = {str(each.high): each.length for each in cut}
    return json.dumps({"max_draft_len": most, "draft_len_schedule": schedule}), notes


def to_sglang(ranges: Sequence[Range]) -> Written:
    """File for --speculative-adaptive-config. Keys are lower bounds, each with a single candidate."""
    table = {str(each.low): {"candidate_steps": [each.length]} for each in ranges}
    return json.dumps(table), ["use SGLang 0.5.23 or newer, with --speculative-adaptive and an EAGLE or EAGLE-3 draft"]


def to_llama_cpp(ranges: Sequence[Range]) -> Written:
    """Flag of llama-server, which has a single length: the one for batch size 1."""
    notes = [] if len(ranges) == 1 else ["llama.cpp has a single length: this is the one for batch size 1"]
    return f"--spec-draft-n-max {ranges[0].length}", notes


WRITERS: dict[str, Callable[[Sequence[Range]], Written]] = {
    "vllm": to_vllm,
    "tensorrt-llm": to_tensorrt_llm,
    "sglang": to_sglang,
    "llama.cpp": to_llama_cpp,
}
FORMATS = ("json", *WRITERS)


def export(
    file: Path | None = typer.Argument(None, help="File to write; default: standard output."),
    db: Path = DB_OPTION,
    context: str = CONTEXT,
    table_format: Annotated[
        str, typer.Option("--format", help=f"{', '.join(FORMATS)}: every arm's estimates, or an engine's table.")
    ] = "json",
) -> None:
    """Write the learned table as JSON (the rows of the view learned_table), or as a static table for another engine.

    A table for an engine has the lengths that `speclen tables` shows for one context, without n-grams.

    Example: speclen export --format vllm --db .speclen/speclen.db
    """
    if table_format not in FORMATS:
        raise UserError(f"--format {table_format!r} is unknown: use {', '.join(FORMATS)}")
    notes: list[str] = []
    if table_format == "json":
        text = json.dumps(rows_of(db, "learned_table", context), indent=1)
    else:
        text, notes = table_for(table_format, db, context)
    if file is None:
        print(text)
    else:
        write_whole(file, text)
    for note in notes:
        print(wrapped(f"{table_format}: {note}"), file=sys.stderr)


def table_for(table_format: str, db: Path, context: str) -> tuple[str, list[str]]:
    """The best lengths in one context, and notes on what the format cannot express. Raises UserError."""
    rows = rows_of(db, "learned_table", context)
    names = {row["context_id"]: row["context"] for row in rows}
    if not names:
        raise UserError(f"{db} holds no learned table yet: let a worker decode a few steps first")
    if len(names) > 1:
        numbered = "; ".join(f"{number}: {name}" for number, name in names.items())
        raise UserError(f"an engine's table is for one context: give its number with --context: {numbered}")
    arms = {row["arm"]: row for row in rows}
    ranges = rows_of(db, "choices", next(iter(map(str, names))))
    ngram = [each["batch_bucket"] for each in ranges if arms[each["arm"]]["ngram"]]
    (name,) = names.values()
    notes = [f"the lengths in use in {name}"]
    if ngram:
        notes = [
            f"the best lengths in {name}",
            f"arms with n-grams are in use at batch sizes {', '.join(ngram)}: the best lengths without n-grams are written",
        ]
    lengths = [Range(each["batch_min"], each["batch_max"], length_in(each, arms, rows)) for each in ranges]
    with user_errors():
        text, limits = WRITERS[table_format](merged(lengths))
    return text, notes + limits


def length_in(shown: Row, arms: dict[str, Row], rows: Sequence[Row]) -> int:
    """The length in use at a range of the view choices, or the best length there if the arm in use has n-grams."""
    if not arms[shown["arm"]]["ngram"]:
        return int(arms[shown["arm"]]["speculation_length"])
    found: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        if not row["ngram"] and shown["batch_min"] <= row["batch_min"] <= shown["batch_max"]:
            found[row["speculation_length"]].append(row["ms_per_token"])
    return min(found, key=lambda length: sum(found[length]) / len(found[length]))
