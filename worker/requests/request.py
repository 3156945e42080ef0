"""Requests to the engine, their validation, and outputs. Plain values, without torch or gRPC.

Errors of validation name the field and its value.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from speclen.records import RequestClass

if TYPE_CHECKING:
    from speclen.worker.sampling.grammar import Grammar

# Highest temperature of that class: most requests ask for 0.7 or 1.0, whose best lengths differ by two or three.
LOW_TEMPERATURE = 0.75
MIN_REPETITION_PENALTY = 0.0099999997  # 0.01 as float32. Logits are divided by it, so 1e-39 would give infinities
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256
MAX_ENTRIES = 1024  # in logit_bias and in stop_token_ids
MOST = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_ENTRIES, "logit_bias": MAX_ENTRIES}
MAX_LOGPROBS = 20
MAX_ANSWER_LOGPROBS = 250_000  # in an answer that is not streamed: some 25 MB of JSON
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 10),
    "presence_penalty": (-10, 10),
    "frequency_penalty": (-10, 10),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "n": (1, 64),
    "seed": (-(2**63), 2**64 - 1),  # 64 bits, signed or not: -1 is the same as 2**64 - 1
}


class FinishReason(enum.Enum):
    """The reason why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, and what ends its sequences. RANGES has their ranges.

    temperature: 0 is greedy. logprobs: k for the log probabilities of the chosen token and of the k most likely ones.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    include_special_tokens: bool = False

    @property
    def request_class(self) -> RequestClass:
        """The request class, whose members have similar acceptance."""
        if self.temperature == 0.0 or self.top_k == 1:
            return RequestClass.GREEDY
        low = self.temperature <= LOW_TEMPERATURE
        return RequestClass.LOW_TEMPERATURE if low else RequestClass.HIGH_TEMPERATURE


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, and how to continue it. With sampling.n > 1 the engine generates n sequences, whose outputs carry an index.

    fixed_length: draft tokens in every step, 0 for plain decoding; None: the table decides. grammar: constraint of the
    output; None for none.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    fixed_length: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the target's unmodified distribution."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence, sent after a step. An output with a finish_reason is the last one of its sequence.

    text: text that is certain with these tokens: whole characters, and nothing that may belong to a stop string. num_*:
    totals so far. error: a sentence, if the sequence was aborted by a failure; is_callers: True if the request itself caused
    it. admitted_at, made_at: times at which the sequence got its slot and the tokens were made, by time.monotonic.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    is_callers: bool = False
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    admitted_at: float | None = None
    made_at: float = 0.0


def joined(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
    """Join outputs of one sequence, in order: the tokens of all, and the totals of the last."""
    return replace(
        outputs[-1],
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        logprobs=tuple(one for output in outputs for one in output.logprobs),
    )


def by_sequence(outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    """Join the outputs of each sequence. Sequences are in the order of their first outputs."""
    groups: dict[tuple[str, int], list[SequenceOutput]] = {}
    for output in outputs:
        groups.setdefault((output.request_id, output.index), []).append(output)
    return [joined(group) for group in groups.values()]


class TextTooLongError(ValueError):
    """The text has more tokens than the model's context."""


class GrammarFailedError(ValueError):
    """The output cannot follow the request's grammar any further."""


class RefusedError(Exception):
    """A valid request is refused or ended.

    reason: a word for programs and metrics. grpc_code, http_status: the status over gRPC and over HTTP.
    """

    reason, grpc_code, http_status = "", "", 0


class QueueFullError(RefusedError):
    """The waiting queue is full: the caller may try again later."""

    reason, grpc_code, http_status = "queue_full", "RESOURCE_EXHAUSTED", 429


class OverloadedError(RefusedError):
    """Too many bodies of HTTP requests arrive at once: the caller may try again later."""

    reason, grpc_code, http_status = "overloaded", "UNAVAILABLE", 503


class UnauthenticatedError(RefusedError):
    """The caller sent no valid key."""

    reason, grpc_code, http_status = "unauthenticated", "UNAUTHENTICATED", 401


class SlowReaderError(RefusedError):
    """The client does not read its answer."""

    reason, grpc_code, http_status = "slow_reader", "ABORTED", 408


class DrainingError(RefusedError):
    """The worker is stopping and accepts no new requests."""

    reason, grpc_code, http_status = "draining", "UNAVAILABLE", 503


class EngineFailedError(RefusedError):
    """The engine's thread has ended, so this worker cannot serve."""

    reason, grpc_code, http_status = "engine_failed", "UNAVAILABLE", 503


class RequestFailedError(RefusedError):
    """A step of this request failed; the worker continues to serve."""

    reason, grpc_code, http_status = "request_failed", "INTERNAL", 500


def check_request(
    request: GenerationRequest,
    vocab_size: int,
    max_context_length: int,
    max_speculation_length: int,
) -> None:
    """Raise ValueError with one sentence for the first field that this engine cannot serve."""
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
    """Raise ValueError if a list is too long, without reading its entries. sampling: has the fields in MOST."""
    for name, limit in MOST.items():
        check_length(name, getattr(sampling, name), limit)


def check_length(name: str, entries: Sized, limit: int) -> None:
    """Raise ValueError if there are more entries than the limit."""
    if len(entries) > limit:
        raise ValueError(f"{name} has {len(entries)} entries, at most {limit} are allowed")


def check_answer_size(requests: Iterable[GenerationRequest], max_context_length: int) -> None:
    """Raise ValueError if an answer with all log probabilities of the requests would be too large for one message."""
    entries = 0
    for request in requests:
        sampling = request.sampling
        tokens = min(sampling.max_tokens, max_context_length - len(request.prompt_ids))
        entries += sampling.n * tokens * (sampling.logprobs or 0)
    if entries > MAX_ANSWER_LOGPROBS:
        raise ValueError(
            f"logprobs may have {entries} entries, at most {MAX_ANSWER_LOGPROBS} are allowed: ask for fewer tokens "
            "or logprobs, or over HTTP use stream"
        )


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError with one sentence for the first field that is out of range."""
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
