"""Asks a controller whether it knows a context, and hands it a profile when it does not."""

from __future__ import annotations

import grpc

from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.profiling.samples import ProfileResult

# What a controller answers for a context that no worker has registered with.
UNKNOWN = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
Metadata = tuple[tuple[str, str | bytes], ...]


def profile_request(context: pb.ContextKey, result: ProfileResult, source: str) -> pb.ImportProfileRequest:
    """The call that hands a profile of this worker's own context to the controller."""
    cells = [
        pb.ProfileCell(
            batch_size=cell.batch_size,
            speculation_length=cell.speculation_length,
            step_s=cell.step_s,
            step_s_stderr=cell.step_s_stderr,
            num_steps=cell.num_steps,
            mean_context_length=cell.mean_context_length,
        )
        for cell in result.cells
    ]
    return pb.ImportProfileRequest(
        context=context,
        cells=cells,
        survival=result.survival,
        num_survival_rows=result.num_survival_rows,
        source=source,
    )


def knows_context(
    channel: grpc.Channel, context: pb.ContextKey, metadata: Metadata = (), timeout_s: float = 5.0
) -> bool | None:
    """Whether the controller has learned or imported anything for the context; None when it does not answer."""
    try:
        response = rpc.ControlServiceStub(channel).GetLearnedTable(
            pb.GetLearnedTableRequest(context=context), timeout=timeout_s, metadata=metadata, wait_for_ready=True
        )
    except grpc.RpcError as error:
        return False if error.code() in UNKNOWN else None
    return any(row.source != "prior" for table in response.tables for row in table.rows)
