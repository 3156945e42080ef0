"""ControlService over gRPC: translates messages, and maps every error to a status."""

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

from speclen.controller.service.learner import Learner
from speclen.controller.service.registry import FullError, OldEpochError, Registration, UnregisteredError, Worker
from speclen.controller.service.streams import StreamEndError, Streams, StreamSettings
from speclen.controller.wire.messages import (
    MAX_HOLDS,
    InvalidMessageError,
    OtherRunError,
    check_identity,
    check_range,
    check_run,
    check_text,
    learned_table_message,
    read_baseline,
    read_context,
    read_hold,
    read_limits,
    read_probe_steps,
    read_profile,
    read_transition_steps,
)
from speclen.records import Arm
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

log = structlog.get_logger()

Call = aio.ServicerContext[Any, Any]


class DrainingError(Exception):
    """The controller is stopping."""


STATUS: dict[type[Exception], grpc.StatusCode] = {
    OldEpochError: grpc.StatusCode.FAILED_PRECONDITION,
    UnregisteredError: grpc.StatusCode.FAILED_PRECONDITION,
    OtherRunError: grpc.StatusCode.FAILED_PRECONDITION,
    FullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DrainingError: grpc.StatusCode.UNAVAILABLE,
    InvalidMessageError: grpc.StatusCode.INVALID_ARGUMENT,
}


# Key of a trailing header: if an epoch is refused as old, the newest one.
NEWEST_EPOCH = "speclen-newest-epoch"

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def answering(method: Method) -> Method:
    """Let a method raise anything: every exception becomes a status."""

    @functools.wraps(method)
    async def answer(self: ControlServicer, request: Any, call: Call) -> Any:
        try:
            return await method(self, request, call)
        except Exception as error:
            await self.fail(call, method.__name__, error)

    return answer  # type: ignore[return-value]


class ControlServicer(rpc.ControlServiceServicer):
    """The seven calls of ControlService. num_errors: by method and status."""

    def __init__(
        self,
        learner: Learner,
        settings: StreamSettings | None = None,
        identity: pb.ServerIdentity | None = None,
    ) -> None:
        self.learner = learner
        self.identity = identity or pb.ServerIdentity()
        self.streams = Streams(learner, self._find, settings)
        self.num_errors: Counter[tuple[str, str]] = Counter()

    @answering
    async def RegisterWorker(  # noqa: N802
        self, request: pb.RegisterWorkerRequest, context: Call
    ) -> pb.RegisterWorkerResponse:
        self._admit()
        check_run(request.run_id, self.identity)
        worker = self.learner.register(registration(request))
        self.streams.end_old_epoch(worker)
        return pb.RegisterWorkerResponse(
            table=self.streams.message_for(worker),
            durable_seq=worker.durable_seq,
            controller=self.identity,
            sample_every=self.learner.sampling.sample_every,
        )

    @answering
    async def ReportStep(self, request: pb.ReportStepRequest, context: Call) -> pb.ReportStepResponse:  # noqa: N802
        self._admit()
        if not request.HasField("report"):
            raise InvalidMessageError("report", "report is missing; it must hold one step")
        worker = self._find(request.worker)
        refusals = self.learner.take(worker, [request.report])
        if refusals:
            raise refusals[0]
        return self._next_arm(worker, request.report.batch_size)

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
        keys = list(self.learner.registry.contexts)
        if request.HasField("context"):
            keys = [read_context(request.context)]
            if keys[0] not in self.learner.registry.contexts:
                raise UnregisteredError(f"context {keys[0]} is unknown: register a worker with it first")
        await self.learner.learn_all()
        response = pb.GetLearnedTableResponse()
        for key in keys:
            response.tables.append(learned_table_message(key, *self.learner.learned(key)))
            await asyncio.sleep(0)  # a thousand contexts take seconds, during which workers wait for answers
        return response

    @answering
    async def ImportProfile(  # noqa: N802
        self, request: pb.ImportProfileRequest, context: Call
    ) -> pb.ImportProfileResponse:
        self._admit()
        profile = read_profile(request)
        profile_id = self.learner.import_profile(read_context(request.context), profile)
        return pb.ImportProfileResponse(profile_id=profile_id, num_cells=len(profile.cells))

    @answering
    async def SetHolds(  # noqa: N802
        self, request: pb.SetHoldsRequest, context: Call
    ) -> pb.SetHoldsResponse:
        self._admit()
        keys = [read_context(request.context)] if request.HasField("context") else list(self.learner.registry.contexts)
        holds = {}
        for key in keys:
            if key not in self.learner.registry.contexts:
                raise UnregisteredError(f"context {key} is unknown: register a worker with it first")
            held = 0 if request.release else len(self.learner.guards.of(key).holds)
            check_range("the number of holds", held + len(request.holds), 0, MAX_HOLDS)
            holds[key] = [read_hold(hold, self.learner.registry.contexts[key].limits) for hold in request.holds]
        for key in keys:
            self.learner.hold(key, holds[key], request.release)
        return pb.SetHoldsResponse(num_contexts=len(keys))

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
        return self.learner.registry.find(identity.worker_id, identity.epoch)

    def _next_arm(self, worker: Worker, batch_size: int) -> pb.ReportStepResponse:
        """The arm of the next step at this batch size: of the worker's probe if it has one, else of the table."""
        table, _ = self.learner.table_in_use(worker)
        probe = worker.take_probe_step(batch_size)
        arm: Arm = probe.arm if probe is not None else table.arm_for(batch_size)
        return pb.ReportStepResponse(
            **arm.within(worker.limits)._asdict(),
            decision_version=table.version,
            probe_id=probe.probe_id if probe is not None else 0,
            applied_seq=worker.seqs.applied_seq,
            durable_seq=worker.durable_seq,
        )

    async def fail(self, call: Call, method: str, error: Exception) -> NoReturn:
        """End the call with the error's status. An unexpected error is logged, and its text is not sent to the caller."""
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
    """A worker's description of itself, validated. Raises InvalidMessageError."""
    check_identity(request.worker)
    return Registration(
        worker_id=request.worker.worker_id,
        epoch=request.worker.epoch,
        key=read_context(request.context),
        limits=read_limits(request.limits),
        probe_steps=read_probe_steps(request.limits),
        transition_steps=read_transition_steps(request.limits),
        baseline=read_baseline(request.baseline, read_limits(request.limits)),
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
