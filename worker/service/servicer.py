"""GenerationService on top of the engine: messages in and out, status codes, cancellation."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc
import structlog
from grpc import aio

from speclen.transport.credentials import Keyring
from speclen.transport.logs import Sparse
from speclen.v1 import generation_pb2 as pb
from speclen.v1 import generation_pb2_grpc
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.reporting.identity import server_identity
from speclen.worker.reporting.messages import to_table
from speclen.worker.requests.request import RefusedError, SequenceOutput, by_sequence, joined
from speclen.worker.requests.validation import check_answer_size, check_length, prompt_too_long
from speclen.worker.service.async_engine import AsyncEngine
from speclen.worker.service.messages import to_chunk, to_complete, to_request, to_request_id, to_structured_output
from speclen.worker.service.relay import OutputStream

log = structlog.get_logger()

CODES = {
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "slow_reader": grpc.StatusCode.ABORTED,
    "draining": grpc.StatusCode.UNAVAILABLE,
    "engine_failed": grpc.StatusCode.UNAVAILABLE,
    "request_failed": grpc.StatusCode.INTERNAL,
}
MAX_ABORTED = 1024  # requests that one call ends
# Fields of the engine's load that GetServerInfo passes on.
TOTALS = (
    *("num_kv_tokens_used", "num_kv_tokens_total", "num_steps", "num_row_steps"),
    *("num_generated_tokens", "num_draft_tokens", "num_accepted_tokens"),
)

Context: TypeAlias = aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Turns RPCs into engine calls. A request whose client is gone is aborted.

    facts: the answer of GetModelInfo. keyring: of the tokens that callers have.
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
        self._identity = server_identity(control.card.run_id)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        # Messages are written, not yielded: only so can a slow client be detected.
        try:
            request_id = to_request_id(request)
            async with self._async_engine.open(request_id, until_end=not request.stream) as stream:
                await self._generate(request, request_id, stream, context)
        except (ValueError, RefusedError) as error:
            code = CODES[error.reason] if isinstance(error, RefusedError) else grpc.StatusCode.INVALID_ARGUMENT
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
        told: dict[int, list[SequenceOutput]] = {}  # by sequence
        patience_s = remaining if (remaining := context.time_remaining()) is not None else math.inf
        running = self._async_engine.running([generation], stream, caller, arrived_at, patience_s)
        async with running as all_outputs:
            # Not with the first message: while that is unread, `abort` would send the metadata again, and fail.
            await context.send_initial_metadata(())
            async for outputs in all_outputs:
                for output in by_sequence(outputs):
                    told.setdefault(output.index, []).append(output)
                    if message.stream and (output.token_ids or output.text):
                        await write(to_chunk(output))
                    if output.finish_reason is not None:
                        await write(to_complete(joined(told.pop(output.index))))
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
        """Send one message. Raises SlowReaderError when the client does not read."""
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
            table=to_table(table.version, table.choices),
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
    """The caller's name: a certificate's subject, else the token's holder where there are several, else the address."""
    names = context.peer_identities()
    if names:
        return b",".join(names).decode("utf-8", errors="replace")
    if keyring is not None and (holder := keyring.caller_in(context.invocation_metadata())):
        return holder
    peer = context.peer()
    kind, _, _ = peer.partition(":")
    return peer.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
