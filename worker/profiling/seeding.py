"""Quick profile before serving, imported by a controller that has nothing for the worker's context."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import structlog

from speclen.records import ProfileCell
from speclen.transport.address import past_proxies
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.config import WorkerConfig
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.profiler import quick_profile
from speclen.worker.profiling.samples import ProfileResult
from speclen.worker.reporting.card import WorkerCard

log = structlog.get_logger()

IMPORT_TIMEOUT_S = 10.0
# Answers for a context that no worker has registered with.
UNKNOWN = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
Metadata = tuple[tuple[str, str | bytes], ...]


def seed_controller(config: WorkerConfig, pair: ModelPair, card: WorkerCard, progress: Callable[[str], None]) -> None:
    """Measure for at most `quick_profile_s`, if needed. A failure is logged: the worker learns without.

    Raises ValueError when certificates or token of the controller cannot be read.
    """
    security = config.controller_security()
    credentials, metadata = security.credentials(), security.metadata()
    address, options = config.controller, past_proxies(config.controller)
    channel = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with channel:
        known = knows_context(channel, card.context, metadata)
        if known is None:
            table = "the given profile" if config.profile else "a default length"
            progress(f"no controller answers at {config.controller}: serving with {table} until one does")
        if known is not False:
            return
        progress(f"no profile of this context yet: measuring one for {config.quick_profile_s:g} s")
        sizes = card.limits.max_batch_size, card.limits.max_speculation_length
        try:
            result = quick_profile(pair, *sizes, config.quick_profile_s, config.backend)
        except Exception as error:
            log.warning("no profile could be measured; going on without", exc_info=error)
            return
        request = profile_request(card.context, result, source="quick profile at the start of a worker")
        try:
            rpc.ControlServiceStub(channel).ImportProfile(request, timeout=IMPORT_TIMEOUT_S, metadata=metadata)
            progress(f"profile of {len(result.cells)} cells handed to the controller")
        except grpc.RpcError as error:
            progress(
                f"the controller did not take the profile ({error.code().name}: {error.details()}); going on without"
            )


def profile_request(context: pb.ContextKey, result: ProfileResult, source: str) -> pb.ImportProfileRequest:
    """The request that imports a profile of this worker's context."""
    return pb.ImportProfileRequest(
        context=context,
        cells=[pb.ProfileCell(**{name: getattr(cell, name) for name in ProfileCell._fields}) for cell in result.cells],
        survival=result.survival,
        num_survival_rows=result.num_survival_rows,
        source=source,
    )


def knows_context(
    channel: grpc.Channel, context: pb.ContextKey, metadata: Metadata = (), timeout_s: float = 5.0
) -> bool | None:
    """True if the controller has learned or imported anything for the context; None when it does not answer."""
    try:
        response = rpc.ControlServiceStub(channel).GetLearnedTable(
            pb.GetLearnedTableRequest(context=context), timeout=timeout_s, metadata=metadata, wait_for_ready=True
        )
    except grpc.RpcError as error:
        return False if error.code() in UNKNOWN else None
    return any(row.source != "prior" for table in response.tables for row in table.rows)
