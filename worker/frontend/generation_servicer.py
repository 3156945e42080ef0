"""The gRPC service Generate: translates messages, runs requests on the engine, and maps errors to status codes."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import grpc
import structlog
from grpc import aio

from speclen.process.credentials import Keyring
from speclen.process.logs import Sparse
from speclen.process.settings import installed_version
from speclen.v1 import control_pb2, generation_pb2_grpc
from speclen.v1 import generation_pb2 as pb
from speclen.worker.frontend.async_engine import AsyncEngine, OutputStream
from speclen.worker.frontend.grammars import ANY_OBJECT, MAX_CHOICES, StructuredOutput
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.conversions import table_message
from speclen.worker.requests.request import (
    GenerationRequest,
    RefusedError,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    by_sequence,
    check_answer_size,
    check_length,
    check_lengths,
    joined,
    prompt_too_long,
)
from speclen.worker.sampling.grammar import Grammar

log = structlog.get_logger()

MAX_REQUEST_ID = 128

# OPTIONAL: fields whose absence means the default, so that a zero that was sent counts as zero.
NAMES = {field.name for field in fields(SamplingParams)}
OPTIONAL = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.name in NAMES and field.has_presence]
MAX_ABORTED = 1024  # requests that one call may abort
# Fields of the engine's load that GetServerInfo passes on.
TOTALS = (
    *("num_kv_tokens_used", "num_kv_tokens_total", "num_steps", "num_row_steps"),
    *("num_generated_tokens", "num_draft_tokens", "num_accepted_tokens"),
)
Context: TypeAlias = aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


def to_sampling(message: pb.SamplingParams, defaults: dict[str, float] | None = None) -> SamplingParams:
    """Sampling parameters from a message. defaults: of the model, for fields that the message leaves out.

    Raises ValueError if a list is too long, before its entries are copied.
    """
    check_lengths(message)
    absent = {name for name in OPTIONAL if not message.HasField(name)}
    values = {name: getattr(message, name) for name in NAMES - absent}
    lists = {"stop": tuple(message.stop), "stop_token_ids": tuple(message.stop_token_ids)}
    return SamplingParams(**(defaults or {}) | values | lists | {"logit_bias": dict(message.logit_bias)})


def to_fixed_length(message: pb.Speculation) -> int | None:
    """The request's own speculation length; None if the table decides. Raises ValueError if the mode is unknown."""
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
    """The request's id, or a new one. Raises ValueError if it is too long."""
    if len(message.request_id) > MAX_REQUEST_ID:
        raise ValueError(f"request_id has {len(message.request_id)} characters, at most {MAX_REQUEST_ID} are allowed")
    return message.request_id or uuid.uuid4().hex


def to_structured_output(message: pb.SamplingParams) -> StructuredOutput | None:
    """The constraint of the output; None if there is none. Raises ValueError if it is empty or has too many choices."""
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
    """The request for the engine. defaults: as for `to_sampling`.

    Raises ValueError if the mode of speculation is unknown or a list is too long.
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
    """New tokens of a stream as a message."""
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
    """The last message of a sequence, from all of its outputs joined."""
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


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The service Generate. A request is aborted if its client disconnects.

    facts: the answer to GetModelInfo. keyring: the accepted tokens, which identify callers.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        control: ControlClient,
        facts: pb.GetModelInfoResponse,
        keyring: Keyring | None = None,
    ) -> None:
        self._async_engine = engine
        self._engine = engine.engine
        self._control = control
        self._facts = facts
        self._keyring = keyring
        self._sparse = Sparse()
        self._identity = control_pb2.ServerIdentity(
            run_id=control.card.run_id,
            host=socket.gethostname(),
            process_id=os.getpid(),
            version=installed_version(),
        )

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        # Messages are written rather than yielded, since only a write shows that a client reads too slowly.
        try:
            request_id = to_request_id(request)
            async with self._async_engine.open(request_id, until_end=not request.stream) as stream:
                await self._generate(request, request_id, stream, context)
        except (ValueError, RefusedError) as error:
            code = grpc.StatusCode[error.grpc_code if isinstance(error, RefusedError) else "INVALID_ARGUMENT"]
            self._async_engine.metrics.refuse(error)
            if (left_out := self._sparse.pass_on(code.name)) is not None:
                log.info("a request ends with an error", code=code.name, reason=str(error), unlogged_before=left_out)
            await context.abort(code, str(error))
        except Exception as error:
            if context.done():  # the client is gone
                raise
            self._async_engine.metrics.refuse(error)
            log.exception("a request over gRPC failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the worker failed to answer; its log says why")

    async def _generate(
        self, message: pb.GenerateRequest, request_id: str, stream: OutputStream, context: Context
    ) -> None:
        arrived_at, caller = time.monotonic(), caller_of(context, self._keyring)
        prompt_ids, wanted = await self._prompt_ids(message, caller), to_structured_output(message.sampling_params)
        grammar = None if wanted is None else await self._async_engine.admission.grammars.prepare(wanted, caller)
        defaults = self._engine.pair.sampling_defaults
        generation = to_request(message, request_id, prompt_ids, grammar, defaults)
        check_answer_size([generation], self._engine.max_context_length)
        write = functools.partial(self._write, stream, context)
        received: dict[int, list[SequenceOutput]] = {}  # by sequence
        patience_s = remaining if (remaining := context.time_remaining()) is not None else math.inf
        running = self._async_engine.running([generation], stream, caller, arrived_at, patience_s)
        async with running as all_outputs:
            # Sent before the first message: while that is unread, `abort` would send the metadata again, and fail.
            await context.send_initial_metadata(())
            async for outputs in all_outputs:
                for output in by_sequence(outputs):
                    received.setdefault(output.index, []).append(output)
                    if message.stream and (output.token_ids or output.text):
                        await write(to_chunk(output))
                    if output.finish_reason is not None:
                        await write(to_complete(joined(received.pop(output.index))))
                    await asyncio.sleep(0)  # log probabilities of one sequence may take long

    async def _prompt_ids(self, message: pb.GenerateRequest, caller: str) -> Sequence[int]:
        kind = message.WhichOneof("input")
        if kind is None:
            raise ValueError("input is missing: set text or tokenized.input_ids")
        if kind == "text":
            return await self._async_engine.admission.encoder.encode(message.text, caller)
        num_ids, limit = len(message.tokenized.input_ids), self._engine.max_context_length
        if num_ids >= limit:  # before a million ids are copied
            raise ValueError(prompt_too_long(num_ids, limit))
        return message.tokenized.input_ids

    async def _write(self, stream: OutputStream, context: Context, message: pb.GenerateResponse) -> None:
        """Send one message. Raises SlowReaderError if the client does not read."""
        async with self._async_engine.reading(stream):
            await context.write(message)

    async def Abort(self, request: pb.AbortRequest, context: aio.ServicerContext[Any, Any]) -> pb.AbortResponse:  # noqa: N802
        try:
            check_length("request_ids", request.request_ids, MAX_ABORTED)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        aborted = [self._async_engine.abort(request_id) for request_id in request.request_ids]
        return pb.AbortResponse(num_aborted=sum(aborted))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: object) -> pb.GetModelInfoResponse:  # noqa: N802
        return self._facts

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: object
    ) -> pb.GetServerInfoResponse:
        load, card, table = self._engine.load(), self._control.card, self._control.table
        return pb.GetServerInfoResponse(
            worker=card.identity(),
            policy=card.policy,
            table_source=table.source,
            table=table_message(table.version, table.choices),
            limits=card.limits_message(),
            num_requests_running=load.num_running,
            num_requests_waiting=load.num_waiting + self._async_engine.admission.num_waiting,
            num_reports_buffered=len(self._control.buffer),
            num_reports_dropped=self._control.buffer.num_dropped,
            **{name: getattr(load, name) for name in TOTALS},
            server=self._identity,
            controller=self._control.controller,
        )


def caller_of(context: Context, keyring: Keyring | None = None) -> str:
    """Name of a caller: the subject of its certificate, else the token's holder if there are several, else its address."""
    names = context.peer_identities()
    if names:
        return b",".join(names).decode("utf-8", errors="replace")
    if keyring is not None and (holder := keyring.caller_in(context.invocation_metadata())):
        return holder
    peer = context.peer()
    kind, _, _ = peer.partition(":")
    return peer.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
