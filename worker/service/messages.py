"""Translation between generation.proto and the engine's values. The engine checks ranges."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import fields

from speclen.v1 import generation_pb2 as pb
from speclen.worker.requests.request import GenerationRequest, SamplingParams, SequenceOutput, TokenLogprobs
from speclen.worker.requests.validation import check_length, check_lengths
from speclen.worker.structured.grammar import Grammar
from speclen.worker.structured.source import ANY_OBJECT, MAX_CHOICES, StructuredOutput

MAX_REQUEST_ID = 128

# Optional fields: absent means a default, zero means zero.
NAMES = {field.name for field in fields(SamplingParams)}
OPTIONAL = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.name in NAMES and field.has_presence]


def to_sampling(message: pb.SamplingParams, defaults: dict[str, float] | None = None) -> SamplingParams:
    """The engine's parameters. defaults: the model's, of fields that the message leaves out.

    Raises ValueError for lists that are too long, before a million entries are copied.
    """
    check_lengths(message)
    absent = {name for name in OPTIONAL if not message.HasField(name)}
    values = {name: getattr(message, name) for name in NAMES - absent}
    lists = {"stop": tuple(message.stop), "stop_token_ids": tuple(message.stop_token_ids)}
    return SamplingParams(**(defaults or {}) | values | lists | {"logit_bias": dict(message.logit_bias)})


def to_fixed_length(message: pb.Speculation) -> int | None:
    """None where the table decides. Raises ValueError for an unknown mode."""
    modes = {
        pb.Speculation.MODE_UNSPECIFIED: None,
        pb.Speculation.MODE_AUTO: None,
        pb.Speculation.MODE_OFF: 0,
        pb.Speculation.MODE_FIXED: message.length,
    }
    if message.mode not in modes:
        raise ValueError(f"speculation.mode {message.mode} is unknown: use MODE_AUTO, MODE_OFF or MODE_FIXED")
    return modes[message.mode]


def to_request_id(message: pb.GenerateRequest) -> str:
    """The request's own id or a new one. Raises ValueError when it is too long."""
    if len(message.request_id) > MAX_REQUEST_ID:
        raise ValueError(f"request_id has {len(message.request_id)} characters, at most {MAX_REQUEST_ID} are allowed")
    return message.request_id or uuid.uuid4().hex


def to_structured_output(message: pb.SamplingParams) -> StructuredOutput | None:
    """None for any output. Raises ValueError for an empty constraint, or too many choices."""
    if not message.HasField("structured_output"):
        return None
    wanted = message.structured_output
    kind = wanted.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not wanted.json_object):
        raise ValueError("structured_output is empty: set one of json_schema, json_object, regex, choice and grammar")
    field = f"structured_output.{kind}"
    whitespace = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern or None
    if kind == "choice":
        check_length(field, wanted.choice.values, MAX_CHOICES)
        return StructuredOutput("choice", json.dumps(list(wanted.choice.values)), field=field)
    if kind == "json_object":
        return StructuredOutput("json_schema", ANY_OBJECT, whitespace, field)
    return StructuredOutput(kind, getattr(wanted, kind), whitespace, field)


def to_request(
    message: pb.GenerateRequest,
    request_id: str,
    prompt_ids: Sequence[int],
    grammar: Grammar | None = None,
    defaults: dict[str, float] | None = None,
) -> GenerationRequest:
    """defaults: as of `to_sampling`.

    Raises ValueError for a mode of speculation that is unknown, and for lists that are too long.
    """
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=to_sampling(message.sampling_params, defaults),
        fixed_length=to_fixed_length(message.speculation),
        grammar=grammar,
    )


def to_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs) for one in logprobs
    ]


def to_chunk(output: SequenceOutput) -> pb.GenerateResponse:
    """The message of some tokens of a stream."""
    chunk = pb.GenerateChunk(
        token_ids=output.token_ids,
        text=output.text,
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_completion_tokens,
        index=output.index,
        logprobs=to_logprobs(output.logprobs),
    )
    return pb.GenerateResponse(request_id=output.request_id, chunk=chunk)


def to_complete(output: SequenceOutput) -> pb.GenerateResponse:
    """The completion of a sequence, from all of its outputs joined."""
    assert output.finish_reason is not None
    complete = pb.GenerateComplete(
        output_ids=output.token_ids,
        text=output.text,
        finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{output.finish_reason.name}"),
        usage=pb.Usage(prompt_tokens=output.num_prompt_tokens, completion_tokens=output.num_completion_tokens),
        speculation=pb.SpeculationStats(
            num_steps=output.num_steps,
            num_draft_tokens=output.num_draft_tokens,
            num_accepted_tokens=output.num_accepted_tokens,
        ),
        index=output.index,
        logprobs=to_logprobs(output.logprobs),
    )
    if isinstance(output.matched_stop, str):
        complete.matched_stop_string = output.matched_stop
    elif output.matched_stop is not None:
        complete.matched_token_id = output.matched_stop
    return pb.GenerateResponse(request_id=output.request_id, complete=complete)
