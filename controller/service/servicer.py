"""ControlService: messages in, messages out, and a status for everything that goes wrong."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from speclen.controller.estimator.core import ContextKey
from speclen.controller.service.learning_service import LearningService
from speclen.controller.service.news import News
from speclen.controller.service.registry import (
    ContextChangedError,
    FullError,
    OldEpochError,
    Registration,
    UnknownWorkerError,
    Worker,
)
from speclen.controller.service.streams import StreamEndError, Streams, StreamSettings
from speclen.controller.wire.messages import learned_table_message
from speclen.controller.wire.validation import (
    InvalidMessageError,
    OtherRunError,
    check_identity,
    check_run,
    check_text,
    read_context,
    read_limits,
    read_probe_steps,
    read_profile,
)
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

log = structlog.get_logger()

Call = aio.ServicerContext[Any, Any]


class DrainingError(Exception):
    """The controller is stopping."""


class UnknownContextError(Exception):
    """Nobody has registered with this context, nor imported a profile for it."""


STATUS: dict[type[Exception], grpc.StatusCode] = {
    UnknownContextError: grpc.StatusCode.FAILED_PRECONDITION,
    OldEpochError: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownWorkerError: grpc.StatusCode.FAILED_PRECONDITION,
    OtherRunError: grpc.StatusCode.FAILED_PRECONDITION,
    FullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    InvalidMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    ContextChangedError: grpc.StatusCode.INVALID_ARGUMENT,
}


# Key of a trailing header that says, where an epoch is refused as old, which one counts.
NEWEST_EPOCH = "speclen-newest-epoch"

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def answering(method: Method) -> Method:
    """Let a method raise what it likes: every exception becomes a status."""

    @functools.wraps(method)
    async def answer(self: ControlServicer, request: Any, call: Call) -> Any:
        try:
            return await method(self, request, call)
        except Exception as error:
            await self.fail(call, method.__name__, error)

    return answer  # type: ignore[return-value]


class ControlServicer(rpc.ControlServiceServicer):
    """The six calls."""

    def __init__(
        self,
        service: LearningService,
        news: News,
        settings: StreamSettings | None = None,
        identity: pb.ServerIdentity | None = None,
    ) -> None:
        self.service = service
        self.identity = identity or pb.ServerIdentity()
        self.streams = Streams(service, self._find, news, settings)
        self.num_errors: Counter[tuple[str, str]] = Counter()  # by method and status

    @answering
    async def RegisterWorker(  # noqa: N802
        self, request: pb.RegisterWorkerRequest, context: Call
    ) -> pb.RegisterWorkerResponse:
        self._admit()
        check_run(request.run_id, self.identity)
        worker = self.service.register(registration(request))
        self.streams.end_old_epoch(worker)
        return pb.RegisterWorkerResponse(
            table=self.streams.table(worker),
            durable_seq=worker.durable_seq,
            controller=self.identity,
            thinning=self.service.thinning.message(self.service.learns_from(worker)),
        )

    @answering
    async def ReportStep(self, request: pb.ReportStepRequest, context: Call) -> pb.ReportStepResponse:  # noqa: N802
        self._admit()
        if not request.HasField("report"):
            raise InvalidMessageError("report", "report is missing; it must hold one step")
        worker = self._find(request.worker)
        refusals = self.service.take(worker, [request.report])
        self.service.learn(worker)
        if refusals:
            raise refusals[0]
        return self._next_length(worker, request.report.batch_size)

    @answering
    async def StreamReports(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.StreamReportsRequest], context: Call
    ) -> None:
        self._admit()
        await self.streams.serve(context)

    @answering
    async def GetLearnedTable(  # noqa: N802
        self, request: pb.GetLearnedTableRequest, context: Call
    ) -> pb.GetLearnedTableResponse:
        keys = list(self.service.contexts)
        if request.HasField("context"):
            keys = [self._known(read_context(request.context))]
        await self.service.learn_all()
        response = pb.GetLearnedTableResponse()
        for key in keys:
            response.tables.append(learned_table_message(key, *self.service.learned(key)))
            await asyncio.sleep(0)  # a thousand contexts take seconds, and workers wait for answers
        return response

    @answering
    async def ImportProfile(  # noqa: N802
        self, request: pb.ImportProfileRequest, context: Call
    ) -> pb.ImportProfileResponse:
        self._admit()
        profile = read_profile(request)
        profile_id = self.service.import_profile(read_context(request.context), profile)
        return pb.ImportProfileResponse(profile_id=profile_id, num_cells=len(profile.cells))

    @answering
    async def GetControllerInfo(  # noqa: N802
        self, request: pb.GetControllerInfoRequest, context: Call
    ) -> pb.GetControllerInfoResponse:
        return pb.GetControllerInfoResponse(server=self.identity)

    def _admit(self) -> None:
        if self.streams.draining:
            raise DrainingError(self.streams.draining)

    def _find(self, identity: pb.WorkerIdentity) -> Worker:
        check_identity(identity)
        return self.service.find(identity.worker_id, identity.epoch)

    def _known(self, key: ContextKey) -> ContextKey:
        if key not in self.service.contexts:
            raise UnknownContextError(
                f"context {key.target} + {key.draft} on {key.device} is unknown: no worker has registered with it"
            )
        return key

    def _next_length(self, worker: Worker, batch_size: int) -> pb.ReportStepResponse:
        """The length for the next step of this batch size: a probe if it is this worker's turn, else the table's."""
        table = self.service.table(worker)
        response = pb.ReportStepResponse(
            speculation_length=table.choice_for(batch_size).length_within(worker.limits.max_speculation_length),
            decision_version=table.version,
            applied_seq=worker.window.applied_seq,
            durable_seq=worker.durable_seq,
        )
        probe, worker.follow_on = worker.follow_on, None
        if probe is None:
            probes = self.service.take_probes(worker, batch_size, lengths_alone=True)
            probe, worker.follow_on = (*probes, None, None)[:2]
        elif response.speculation_length:
            probe = None  # it was to follow a step without drafts, and is not worth leaving what drafts
        if probe is not None:
            response.speculation_length, response.probe_id = probe.speculation_length, probe.probe_id
        return response

    async def fail(self, call: Call, method: str, error: Exception) -> NoReturn:
        """End the call with the status that belongs to the error; what nobody foresaw is logged, not told."""
        if isinstance(error, aio.AbortError):
            raise error
        code, details = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            log.error("call failed", method=method, exc_info=error)
        self.num_errors[method, code.name] += 1
        newest = ((NEWEST_EPOCH, str(error.newest)),) if isinstance(error, OldEpochError) else ()
        await call.abort(code, details, newest)
        raise AssertionError("abort has returned")


def registration(request: pb.RegisterWorkerRequest) -> Registration:
    """What the worker says of itself, checked. Raises InvalidMessageError."""
    check_identity(request.worker)
    return Registration(
        worker_id=request.worker.worker_id,
        epoch=request.worker.epoch,
        key=read_context(request.context),
        limits=read_limits(request.limits),
        probe_steps=read_probe_steps(request.limits),
        address=check_text("address", request.address, 0, 256),
        policy=check_text("policy", request.policy, 0, 64),
    )


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Status code and sentence for an exception."""
    if isinstance(error, StreamEndError):
        return error.code, str(error)
    if isinstance(error, DecodeError):
        return (
            grpc.StatusCode.INVALID_ARGUMENT,
            "a message cannot be parsed: it must be what the method's definition says",
        )
    for kind, code in STATUS.items():
        if isinstance(error, kind):
            return code, str(error)
    return grpc.StatusCode.INTERNAL, "the controller failed to answer; its log says why"
