"""Identity of a server: asked before it is taken for the one that was started, or that owns a database."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import grpc

from speclen.cli.support.client import Client, is_listening
from speclen.cli.support.errors import UserError
from speclen.transport.address import check_free
from speclen.transport.credentials import ClientSecurity
from speclen.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

PATIENCE_S = 1.0


def identity(channel: grpc.Channel, kind: str, timeout_s: float = PATIENCE_S) -> control_pb2.ServerIdentity:
    """The identity that the worker or controller (`kind`) states. Raises grpc.RpcError."""
    if kind == "controller":
        asked = control_pb2.GetControllerInfoRequest()
        return control_pb2_grpc.ControlServiceStub(channel).GetControllerInfo(asked, timeout=timeout_s).server
    info = generation_pb2.GetServerInfoRequest()
    return generation_pb2_grpc.GenerationServiceStub(channel).GetServerInfo(info, timeout=timeout_s).server


def occupant(address: str, client: Client) -> str:
    """The program that listens at an address, in words."""
    for kind in ("controller", "worker"):
        try:
            with client.channel(address) as channel:
                found = identity(channel, kind)
        except grpc.RpcError:
            continue
        if found.process_id:
            database = f" of {found.database}" if found.database else ""
            return f"a speclen {kind}{database} (process {found.process_id} on {found.host})"
    return "another program, or a speclen that wants TLS or a token"


def check_available(flag: str, address: str, client: Client) -> None:
    """Raises UserError, naming who is there, when an address is taken or none at all."""
    try:
        check_free(flag, address)
    except (ValueError, OSError) as error:
        if not str(error).startswith(f"cannot listen on {address}: Address already in use"):
            raise UserError(str(error)) from error
        raise UserError(
            f"{address} is taken by {occupant(address, client)}: stop that, or choose another with {flag}"
        ) from error


def owns(found: control_pb2.ServerIdentity, database: Path) -> bool:
    """True if the controller keeps this very file, whatever it is called."""
    if found.host != socket.gethostname():
        return False
    try:
        return os.path.samefile(found.database, database)
    except OSError:
        return False


def check_controller(security: ClientSecurity, address: str, run_id: str) -> None:
    """Raises UserError, ValueError when a controller answers that will never do: another run's, or one that refuses us.

    None at all is no error: a worker serves until one comes.
    """
    client = Client(security)
    for last in (False, True):  # something that listens is asked twice, since a controller may just be starting
        try:
            with client.channel(address, "--controller") as channel:
                found = identity(channel, "controller")
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code is grpc.StatusCode.UNAVAILABLE and is_listening(address):
                if not last:
                    time.sleep(0.3)
                    continue
            elif not (code is grpc.StatusCode.UNAUTHENTICATED or (code is grpc.StatusCode.UNIMPLEMENTED and run_id)):
                return
            raise UserError(client.explain(error, "controller", address)) from error
        if run_id and found.run_id != run_id:
            raise UserError(f"{address} is taken by {occupant(address, client)}: give --controller the one of this run")
        return
