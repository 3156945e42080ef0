"""Lengths by batch size in the formats of other engines: what each can hold, and what it cannot.

Where a format cannot hold a table, the nearest that it can is written, with a note.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

VLLM_KEY = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True, slots=True)
class Range:
    """Batch sizes low..high use a length."""

    low: int
    high: int
    length: int


Written = tuple[str, list[str]]  # a table in a format, and what the format cannot hold, one sentence each


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
    notes = [] if most else ["vLLM needs num_speculative_tokens of at least 1: 1 is written, though none is in use"]
    table = [[each.low, each.high, each.length] for each in ranges]
    return json.dumps({"num_speculative_tokens": max(1, most), VLLM_KEY: table}), notes


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
    return json.dumps({"max_draft_len": most, "draft_len_schedule": schedule}), notes


def to_sglang(ranges: Sequence[Range]) -> Written:
    """For the file of --speculative-adaptive-config. Keys are lower bounds; one candidate each leaves it no choice."""
    notes = []
    if any(not each.length for each in ranges):
        notes.append("SGLang has no length 0 in its table: 1 is written instead")
    cut = merged(Range(each.low, each.high, max(1, each.length)) for each in ranges)
    table = {str(each.low): {"candidate_steps": [each.length]} for each in cut}
    notes.append("start SGLang with --speculative-adaptive, --speculative-eagle-topk 1 and one of these as num_steps")
    return json.dumps(table), notes


def to_llama_cpp(ranges: Sequence[Range]) -> Written:
    """Flags of llama-server, which has one length for all batch sizes: that of one request."""
    lengths = {each.length for each in ranges}
    notes = (
        [] if len(lengths) == 1 else ["llama.cpp has one length for all batch sizes: this is the one for batch size 1"]
    )
    return f"--spec-draft-n-max {ranges[0].length}", notes


WRITERS: dict[str, Callable[[Sequence[Range]], Written]] = {
    "vllm": to_vllm,
    "tensorrt-llm": to_tensorrt_llm,
    "sglang": to_sglang,
    "llama.cpp": to_llama_cpp,
}
