"""Lengths by batch size in the formats of other engines: what each can hold, and what it cannot.

Ranges are merged where neighbours agree. Where a format cannot hold a table, the nearest that it can is written, with a
note. Read back, a table is ranges again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from speclen.records import MAX_BATCH_SIZE, MAX_SPECULATION_LENGTH

VLLM_KEY = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True, slots=True)
class Range:
    """Batch sizes low..high use a length."""

    low: int
    high: int
    length: int


@dataclass(frozen=True, slots=True)
class Written:
    """A table in a format. notes: what the format cannot hold, one sentence each."""

    text: str
    notes: list[str] = field(default_factory=list)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same table in as few ranges as can be, ascending. Raises ValueError unless they cover 1 to some size once."""
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
    """For --speculative-config, beside method and model. Above the last range vLLM goes on with its length."""
    most = max(each.length for each in ranges)
    notes = [] if most else ["vLLM wants num_speculative_tokens of at least 1, so that is written though none is used"]
    table = [[each.low, each.high, each.length] for each in ranges]
    return Written(json.dumps({"num_speculative_tokens": max(1, most), VLLM_KEY: table}), notes)


def to_tensorrt_llm(ranges: Sequence[Range]) -> Written:
    """For speculative_config in YAML, of which JSON is a part. Keys are upper bounds; above the last nothing is drafted."""
    most, notes = ranges[0].length, []
    if not most:
        raise ValueError(
            "TensorRT-LLM wants the longest draft at the smallest batch, where this table drafts none: leave "
            "speculation off, or take another format"
        )
    if any(each.length > most for each in ranges):
        notes.append(
            f"TensorRT-LLM allows no draft longer than that of the smallest batch: longer ones are cut to {most}"
        )
    cut = merged(Range(each.low, each.high, min(each.length, most)) for each in ranges)
    notes.append(f"above batch size {cut[-1].high} TensorRT-LLM does not speculate")
    schedule = {str(each.high): each.length for each in cut}
    return Written(json.dumps({"max_draft_len": most, "draft_len_schedule": schedule}), notes)


def to_sglang(ranges: Sequence[Range]) -> Written:
    """For the file of --speculative-adaptive-config. Keys are lower bounds; one candidate each leaves it no choice."""
    notes = []
    if any(not each.length for each in ranges):
        notes.append("SGLang has no length 0 in its table: 1 is written instead")
    cut = merged(Range(each.low, each.high, max(1, each.length)) for each in ranges)
    table = {str(each.low): {"candidate_steps": [each.length]} for each in cut}
    notes.append("start SGLang with --speculative-adaptive, --speculative-eagle-topk 1 and one of these as num_steps")
    return Written(json.dumps(table), notes)


def to_llama_cpp(ranges: Sequence[Range]) -> Written:
    """Flags of llama-server, which has one length for all batch sizes: that of one request."""
    lengths = {each.length for each in ranges}
    notes = (
        [] if len(lengths) == 1 else ["llama.cpp has one length for all batch sizes: this is the one for batch size 1"]
    )
    return Written(f"--spec-draft-n-max {ranges[0].length}", notes)


def from_vllm(text: str) -> list[Range]:
    content = json.loads(text)
    table = content[VLLM_KEY] if isinstance(content, dict) else content
    starts = sorted(([int(value) for value in entry] for entry in table), key=lambda entry: entry[0])
    # A gap goes on with the length before it.
    after = [entry[0] for entry in starts[1:]]
    return [
        Range(low, max(high, following - 1), length)
        for (low, high, length), following in zip(starts, [*after, 0], strict=True)
    ]


def from_tensorrt_llm(text: str) -> list[Range]:
    content = json.loads(text)
    schedule = sorted((int(high), int(length)) for high, length in content.get("draft_len_schedule", content).items())
    lows = [1, *(high + 1 for high, _ in schedule)]
    return [Range(low, high, length) for low, (high, length) in zip(lows, schedule, strict=False)]


def from_sglang(text: str) -> list[Range]:
    table = sorted((int(low), max(entry["candidate_steps"])) for low, entry in json.loads(text).items())
    ends = [low - 1 for low, _ in table[1:]] + [MAX_BATCH_SIZE]
    return [Range(low, end, int(length)) for (low, length), end in zip(table, ends, strict=True)]


def from_llama_cpp(text: str) -> list[Range]:
    match = re.search(r"--(?:spec-draft-n-max|draft-max|draft-n)[ =](\d+)", text)
    if match is None:
        raise ValueError("it names no --spec-draft-n-max")
    return [Range(1, MAX_BATCH_SIZE, int(match[1]))]


WRITERS: dict[str, Callable[[Sequence[Range]], Written]] = {
    "vllm": to_vllm,
    "tensorrt-llm": to_tensorrt_llm,
    "sglang": to_sglang,
    "llama.cpp": to_llama_cpp,
}
READERS: dict[str, Callable[[str], list[Range]]] = {
    "vllm": from_vllm,
    "tensorrt-llm": from_tensorrt_llm,
    "sglang": from_sglang,
    "llama.cpp": from_llama_cpp,
}


def read_table(text: str, table_format: str) -> list[Range]:
    """The table in a text. Raises ValueError saying what is wrong with it."""
    try:
        ranges = merged(READERS[table_format](text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no table of {table_format}: {describe(error)}") from error
    if ranges[-1].high > MAX_BATCH_SIZE or not all(0 <= each.length <= MAX_SPECULATION_LENGTH for each in ranges):
        raise ValueError(f"batch sizes must be at most {MAX_BATCH_SIZE}, lengths 0 to {MAX_SPECULATION_LENGTH}")
    return ranges


def describe(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def length_at(ranges: Sequence[Range], batch_size: int) -> int:
    """The length at a batch size; above the last range the last one's."""
    return next((each.length for each in ranges if batch_size <= each.high), ranges[-1].length)


def ranges_of(choices: Iterable[dict[str, Any]]) -> list[Range]:
    """The table of one context from rows of the view learned_table, one per range, merged. Raises ValueError."""
    rows = [Range(row["batch_min"], row["batch_max"], row["speculation_length"]) for row in choices]
    rows.sort(key=lambda each: each.low)
    for one, following in pairwise(rows):
        if following.low <= one.high:
            raise ValueError("the rows are of several contexts")
    return merged(rows)
