"""Hands a profile to the controller that owns a database: the one that runs, or one started for the moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from speclen.console.errors import UserError
from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.core import ContextKey
from speclen.controller.service.server import running
from speclen.v1 import control_pb2 as pb
from speclen.v1 import control_pb2_grpc as rpc

TIMEOUT_S = 30.0


def import_profile(request: pb.ImportProfileRequest, db: Path, controller: str) -> tuple[int, str]:
    """Id of the stored profile, and who stored it.

    controller: address of a controller to send it to; empty: the one that runs on `db`, expected at its default
    address, or, when none runs on it, one that lives for this call, so that a profile seeds the estimator in one way
    only. Raises UserError.
    """
    if controller:
        return send(request, controller), f"the controller at {controller}"
    default = ControllerConfig().listen
    try:
        return asyncio.run(send_to_own(request, db)), str(db)
    except ValueError as error:
        if "in use by another controller" not in str(error):
            raise UserError(str(error)) from error
    return send(request, default), f"the controller at {default}, which owns {db}"


async def send_to_own(request: pb.ImportProfileRequest, db: Path) -> int:
    """Import through a controller of this process. Raises ValueError when the database is in use or unusable."""
    db.parent.mkdir(parents=True, exist_ok=True)
    async with (
        running(ControllerConfig(listen="127.0.0.1:0", db=db)) as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.port}") as channel,
    ):
        response = await rpc.ControlServiceStub(channel).ImportProfile(request, timeout=TIMEOUT_S)
    return response.profile_id


def send(request: pb.ImportProfileRequest, address: str) -> int:
    """Import through a running controller. Raises UserError when it does not answer or refuses."""
    try:
        with grpc.insecure_channel(address) as channel:
            return rpc.ControlServiceStub(channel).ImportProfile(request, timeout=TIMEOUT_S).profile_id
    except grpc.RpcError as error:
        detail = error.details()
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise UserError(f"no controller answers at {address}: give its address with --controller") from error
        raise UserError(f"the controller at {address} refused the profile: {detail}") from error


def check_same_context(path: Path, theirs: ContextKey, here: ContextKey, as_prior: bool) -> None:
    """Raises UserError naming every difference, unless they are accepted."""
    different = [
        f"{name} {getattr(theirs, name)!r} instead of {getattr(here, name)!r}"
        for name in ("target", "draft", "device", "dtype", "engine_fingerprint")
        if getattr(theirs, name) != getattr(here, name)
    ]
    if different and not as_prior:
        raise UserError(
            f"{path} was measured with {'; '.join(different)}: it does not describe this context; "
            "give --as-prior to use it as a starting point"
        )
