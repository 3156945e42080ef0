"""Requests to the engine and its outputs. Plain values; no torch, no gRPC."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from speclen.records import RequestClass

if TYPE_CHECKING:
    from speclen.worker.structured.grammar import Grammar


class FinishReason(enum.Enum):
    """Reason for the end of a sequence."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


# Highest temperature of the class: most ask for 0.7 or 1.0, whose best lengths differ by two or three.
LOW_TEMPERATURE = 0.75


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and end of a sequence. Ranges are those of generation.proto.

    temperature 0 is greedy. logprobs None: none; k: the chosen token's and the k most likely ones'.
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
        """The class of requests with similar acceptance."""
        if self.temperature == 0.0 or self.top_k == 1:
            return RequestClass.GREEDY
        low = self.temperature <= LOW_TEMPERATURE
        return RequestClass.LOW_TEMPERATURE if low else RequestClass.HIGH_TEMPERATURE


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt. `fixed_length` None: the table decides; k: always k draft tokens (0: plain decoding).
    grammar: constraint of the output, None for any.

    With sampling.n > 1 the engine runs n sequences; their outputs carry the index.
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
    """New tokens of one sequence, and, once finish_reason is set, its totals. Sent after a step.

    text: text that is certain with these tokens (whole characters, nothing that may belong to a stop string).
    num_*: totals so far. A message with a finish_reason is the last one of its index. error: a sentence beside ABORT, unless
    the caller aborted; is_callers: True if the request itself is the cause. admitted_at, made_at: times of the slot and of
    the tokens, by time.monotonic.
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
    """Outputs of one sequence, in order, as one: the tokens of all, and the totals of the last."""
    return replace(
        outputs[-1],
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        logprobs=tuple(one for output in outputs for one in output.logprobs),
    )


def by_sequence(outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    """Outputs in order, those of each sequence joined."""
    groups: dict[tuple[str, int], list[SequenceOutput]] = {}
    for output in outputs:
        groups.setdefault((output.request_id, output.index), []).append(output)
    return [joined(group) for group in groups.values()]


class TextTooLongError(ValueError):
    """A text with more tokens than the model's context."""


class GrammarFailedError(ValueError):
    """A grammar that cannot be followed any further."""


class RefusedError(Exception):
    """A valid request that is refused or ended. reason: a word for programs and metrics."""

    reason = ""


class QueueFullError(RefusedError):
    """The waiting queue is at its bound: try again later."""

    reason = "queue_full"


class OverloadedError(RefusedError):
    """Too many bodies arrive at once: try again later."""

    reason = "overloaded"


class UnauthenticatedError(RefusedError):
    """The caller sent no valid key."""

    reason = "unauthenticated"


class SlowReaderError(RefusedError):
    """The client does not read its answer."""

    reason = "slow_reader"


class DrainingError(RefusedError):
    """The engine accepts no new requests because it is stopping."""

    reason = "draining"


class EngineFailedError(RefusedError):
    """The engine's thread has ended: this worker cannot serve."""

    reason = "engine_failed"


class RequestFailedError(RefusedError):
    """A step of this request failed; the worker goes on."""

    reason = "request_failed"
