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

# Optional fields: absent means the default of SamplingParams, zero means zero.
NAMES = {field.name for field in fields(SamplingParams)}
OPTIONAL = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.name in NAMES and field.has_presence]


def to_sampling(message: pb.SamplingParams) -> SamplingParams:
    """The engine's parameters; fields that the message leaves out keep their defaults.

    Raises ValueError for lists that are too long, before a million entries are copied.
    """
    check_lengths(message)
    absent = {name for name in OPTIONAL if not message.HasField(name)}  # type: ignore[arg-type]
    values = {name: getattr(message, name) for name in NAMES - absent}
    lists = {"stop": tuple(message.stop), "stop_token_ids": tuple(message.stop_token_ids)}
    return SamplingParams(**values | lists | {"logit_bias": dict(message.logit_bias)})


def to_fixed_length(message: pb.Speculation) -> int | None:
    """None where the table decides. Raises ValueError for an unknown mode."""
    modes = {
        pb.Speculation.MODE_UNSPECIFIED: None,
        pb.Speculation.MODE_AUTO: None,
        pb.Speculation.MODE_OFF: 0,
        pb.Speculation.MODE_FIXED: message.length,
    }
    if message.mode not in modes:
        raise ValueError(f"speculation.mode {message.mode} is unknown")
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
    message: pb.GenerateRequest, request_id: str, prompt_ids: Sequence[int], grammar: Grammar | None = None
) -> GenerationRequest:
    """Raises ValueError for a mode of speculation that is unknown, and for lists that are too long."""
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=to_sampling(message.sampling_params),
        fixed_length=to_fixed_length(message.speculation),
        grammar=grammar,
    )


def to_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs) for one in logprobs
    ]


class SequenceMessages:
    """Builder of the messages of one sequence: chunks, and the completion of all added outputs."""

    def __init__(self, request_id: str, index: int) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprobs] = []

    def add(self, outputs: Sequence[SequenceOutput]) -> None:
        """Add outputs of one or more steps to the completion."""
        for output in outputs:
            self.token_ids += output.token_ids
            self.text.append(output.text)
            self.logprobs += output.logprobs

    def chunk(self, outputs: Sequence[SequenceOutput]) -> pb.GenerateResponse:
        """One chunk for the outputs of one or more steps, which must not be empty."""
        chunk = pb.GenerateChunk(
            token_ids=[token for output in outputs for token in output.token_ids],
            text="".join(output.text for output in outputs),
            prompt_tokens=outputs[-1].num_prompt_tokens,
            completion_tokens=outputs[-1].num_completion_tokens,
            index=self.index,
            logprobs=to_logprobs([one for output in outputs for one in output.logprobs]),
        )
        return pb.GenerateResponse(request_id=self.request_id, chunk=chunk)

    def complete(self, last: SequenceOutput) -> pb.GenerateResponse:
        """The completion, once every output was added, `last` included."""
        assert last.finish_reason is not None
        complete = pb.GenerateComplete(
            output_ids=self.token_ids,
            text="".join(self.text),
            finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{last.finish_reason.name}"),
            usage=pb.Usage(prompt_tokens=last.num_prompt_tokens, completion_tokens=last.num_completion_tokens),
            speculation=pb.SpeculationStats(
                num_steps=last.num_steps,
                num_draft_tokens=last.num_draft_tokens,
                num_accepted_tokens=last.num_accepted_tokens,
            ),
            index=self.index,
            logprobs=to_logprobs(self.logprobs),
        )
        if isinstance(last.matched_stop, str):
            complete.matched_stop_string = last.matched_stop
        elif last.matched_stop is not None:
            complete.matched_token_id = last.matched_stop
        return pb.GenerateResponse(request_id=self.request_id, complete=complete)
