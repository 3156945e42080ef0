"""Validation of requests; errors name the field and its value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from typing import Any

from speclen.worker.requests.request import GenerationRequest, SamplingParams

MAX_SEQUENCES = 64
MIN_REPETITION_PENALTY = 0.0099999997  # 0.01 as float32. Logits are divided by it: 1e-39 would give infinities
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256
MAX_ENTRIES = 1024  # of logit_bias and stop_token_ids
MOST = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_ENTRIES, "logit_bias": MAX_ENTRIES}
MAX_LOGPROBS = 20
MAX_ANSWER_LOGPROBS = 250_000  # in one answer that is put together as a whole: some 25 MB of JSON
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # 64 bits, signed or not: -1 is the same as 2**64 - 1
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 10),
    "presence_penalty": (-10, 10),
    "frequency_penalty": (-10, 10),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, MAX_SEQUENCES),
    "seed": (MIN_SEED, MAX_SEED),
}


def check_request(
    request: GenerationRequest,
    vocab_size: int,
    max_context_length: int,
    max_speculation_length: int,
) -> None:
    """Raises ValueError with one sentence when a field is out of the range that generation.proto gives."""
    num_tokens = len(request.prompt_ids)
    if not num_tokens:
        raise ValueError("prompt is empty: at least one token is needed")
    if num_tokens >= max_context_length:
        raise ValueError(prompt_too_long(num_tokens, max_context_length))
    _check_ids("prompt token", request.prompt_ids, vocab_size)
    length = request.fixed_length
    if length is not None and not 0 <= length <= max_speculation_length:
        raise ValueError(f"speculation.length is {length}, allowed are 0 to {max_speculation_length}")
    check_sampling(request.sampling, vocab_size)


def prompt_too_long(num_tokens: int, max_context_length: int) -> str:
    return (
        f"prompt has {num_tokens} tokens, but the model's context of {max_context_length} must hold it and a new token: "
        "shorten it"
    )


def check_lengths(sampling: Any) -> None:
    """Raises ValueError for a list that is too long, without reading its entries. sampling: has fields of these names."""
    for name, limit in MOST.items():
        check_length(name, getattr(sampling, name), limit)


def check_length(name: str, entries: Sized, limit: int) -> None:
    """Raises ValueError for more entries than that."""
    if len(entries) > limit:
        raise ValueError(f"{name} has {len(entries)} entries, at most {limit} are allowed")


def check_answer_size(requests: Iterable[GenerationRequest], max_context_length: int) -> None:
    """Raises ValueError if an answer with all log probabilities of the requests would be too large for one message."""
    entries = 0
    for request in requests:
        sampling = request.sampling
        tokens = min(sampling.max_tokens, max_context_length - len(request.prompt_ids))
        entries += sampling.n * tokens * (sampling.logprobs or 0)
    if entries > MAX_ANSWER_LOGPROBS:
        raise ValueError(
            f"logprobs of so many tokens may be {entries} entries, at most {MAX_ANSWER_LOGPROBS} are allowed: ask for "
            "fewer, or over HTTP use stream"
        )


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError with one sentence for the first field that is out of range."""
    check_lengths(sampling)
    for name, (low, high) in RANGES.items():
        if (value := getattr(sampling, name)) is not None:
            _check_range(name, value, low, high)
    if sampling.logprobs is not None:
        _check_range("logprobs", sampling.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}, but must be more than 0 and at most 1")
    _check_ids("logit_bias token", sampling.logit_bias, vocab_size)
    for token, bias in sampling.logit_bias.items():
        _check_range(f"logit_bias[{token}]", bias, -100, 100)
    if sampling.min_tokens > sampling.max_tokens:
        raise ValueError(f"min_tokens is {sampling.min_tokens}, more than max_tokens, {sampling.max_tokens}")
    _check_ids("stop_token_ids token", sampling.stop_token_ids, vocab_size)
    for text in sampling.stop:
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise ValueError(f"stop has a string of {len(text)} characters, allowed are 1 to {MAX_STOP_LENGTH}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails too
        upper = "" if high == math.inf else f" and at most {high}"
        raise ValueError(f"{name} is {value}, but must be at least {low:g}{upper}")


def _check_ids(name: str, ids: object, vocab_size: int) -> None:
    for token in ids:  # type: ignore[attr-defined]
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} {token} is unknown: token ids go from 0 to {vocab_size - 1}")
