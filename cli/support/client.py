"""How verbs reach the servers: channels with TLS and token, failed calls explained in a sentence, server identities."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from speclen.cli.support.output import UserError, user_errors
from speclen.process.credentials import ClientSecurity
from speclen.process.settings import UNIX, bind, check_free, past_proxies, settings_of, split_address
from speclen.v1 import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc

# A request is sent once more if its worker dies before the first response; gRPC never repeats one that has begun to stream.
# Ray's proxy reports a dead worker as INTERNAL, and a worker reports a failed step the same way.
RETRY = {
    "methodConfig": [
        {
            "name": [{"service": "speclen.v1.GenerationService"}],
            "retryPolicy": {
                "maxAttempts": 2,
                "initialBackoff": "0.2s",
                "maxBackoff": "0.2s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["UNAVAILABLE", "INTERNAL"],
            },
        }
    ]
}
OPTIONS = (("grpc.service_config", json.dumps(RETRY)),)
WORKER = "127.0.0.1:7080"  # a worker's default address
IDENTITY_TIMEOUT_S = 1.0


class Client:
    """Opens channels to our servers with the configured TLS and token. Raises UserError for unusable files."""

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self.security = security or ClientSecurity()
        with user_errors():
            self._credentials, metadata = self.security.credentials(), self.security.metadata()
        self._interceptors = [Bearer(metadata)] if metadata else []

    def channel(self, address: str, flag: str = "--worker") -> grpc.Channel:
        """A channel whose calls carry the token. Raises UserError if the address is not HOST:PORT."""
        with user_errors():
            if not address.startswith(UNIX):
                split_address(flag, address)
        options = [*OPTIONS, *past_proxies(address)]
        if self._credentials is None:
            channel = grpc.insecure_channel(address, options)
        else:
            channel = grpc.secure_channel(address, self._credentials, options)
        return grpc.intercept_channel(channel, *self._interceptors)

    @contextlib.contextmanager
    def calling(self, kind: str, address: str) -> Iterator[grpc.Channel]:
        """A channel to a worker or controller (`kind`), on which a failed call raises UserError."""
        with self.channel(address, f"--{kind}") as channel:
            try:
                yield channel
            except grpc.RpcError as error:
                raise UserError(self.explain(error, kind, address)) from error

    def explain(self, error: grpc.RpcError, kind: str, address: str) -> str:
        """Explain in one sentence why a call to the worker or controller (`kind`) failed."""
        assert isinstance(error, grpc.Call)
        code, details, prefix = error.code(), error.details() or "", self.security.prefix
        if code is grpc.StatusCode.UNAVAILABLE:
            return self._unreachable(kind, address, details)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            if self.security.token_file is None:
                return f"the {kind} at {address} requires a token: name the file that holds it with {prefix}token-file"
            return f"the {kind} at {address} rejects the token in {self.security.token_file}: use the server's token"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return f"{address} is not a speclen {kind}: give the address of one with --{kind}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the {kind} at {address} did not answer in time: try again, or look at its log"
        return f"the {kind} at {address} answered {code.name}: {details}"

    def _unreachable(self, kind: str, address: str, details: str) -> str:
        ca, prefix = self.security.ca, self.security.prefix
        if any(words in details for words in ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification", "match target")):
            return f"{prefix}ca {ca} does not verify the {kind} at {address}: name the CA that signed its certificate"
        if not is_listening(address):
            return f"no {kind} answers at {address}: start one with `speclen up`, or name its address with --{kind}"
        if ca is None:
            return f"no {kind} answers at {address}, but the port is open: if the {kind} uses TLS, give {prefix}ca"
        return (
            f"{address} refuses our TLS connection: drop {prefix}ca if the {kind} does not use TLS, or give {prefix}cert "
            f"and {prefix}key if it requires a client certificate"
        )


def client_from(settings: dict[str, Any]) -> Client:
    """The client configured by a verb's settings; unrelated settings are ignored."""
    return Client(ClientSecurity(**{name: settings[name] for name in settings_of(ClientSecurity)}))


def is_listening(address: str, timeout_s: float = 0.5) -> bool:
    """True if a program accepts connections at the address."""
    with contextlib.suppress(OSError, ValueError):
        if address.startswith(UNIX):
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(unquote(address.removeprefix(UNIX)))
                return True
        socket.create_connection(split_address("--worker", address), timeout_s).close()
        return True
    return False


def free_port(address: str) -> str:
    """The address with its port replaced by one that is free now."""
    host = address.rpartition(":")[0]
    with user_errors((ValueError, OSError)), bind("--listen", f"{host}:0") as probe:
        return f"{host}:{probe.getsockname()[1]}"


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the token to every call."""

    def __init__(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = (*(client_call_details.metadata or ()), *self._metadata)
        return continuation(client_call_details._replace(metadata=metadata), request)  # a named tuple

    intercept_unary_stream = intercept_unary_unary


def identity(channel: grpc.Channel, kind: str, timeout_s: float = IDENTITY_TIMEOUT_S) -> control_pb2.ServerIdentity:
    """The identity reported by a worker or controller (`kind`). Raises grpc.RpcError."""
    if kind == "controller":
        asked = control_pb2.GetControllerInfoRequest()
        return control_pb2_grpc.ControlServiceStub(channel).GetControllerInfo(asked, timeout=timeout_s).server
    info = generation_pb2.GetServerInfoRequest()
    return generation_pb2_grpc.GenerationServiceStub(channel).GetServerInfo(info, timeout=timeout_s).server


def occupant(address: str, client: Client) -> str:
    """Describe the program that listens at an address."""
    for kind in ("controller", "worker"):
        try:
            with client.channel(address) as channel:
                found = identity(channel, kind)
        except grpc.RpcError:
            continue
        if found.process_id:
            database = f" of {found.database}" if found.database else ""
            return f"a speclen {kind}{database} (process {found.process_id} on {found.host})"
    return "another program, or a speclen server that requires TLS or a token"


def check_available(flag: str, address: str, client: Client) -> None:
    """Raise UserError if the address is malformed, or is taken; the error names the program that holds it."""
    try:
        check_free(flag, address)
    except (ValueError, OSError) as error:
        if not str(error).startswith(f"cannot listen on {address}: Address already in use"):
            raise UserError(str(error)) from error
        raise UserError(
            f"{address} is taken by {occupant(address, client)}: stop that, or choose another with {flag}"
        ) from error


def owns(found: control_pb2.ServerIdentity, database: Path) -> bool:
    """True if the controller keeps this very file, under whatever name."""
    if found.host != socket.gethostname():
        return False
    try:
        return os.path.samefile(found.database, database)
    except OSError:
        return False


def check_controller(security: ClientSecurity, address: str, run_id: str) -> None:
    """Raise UserError or ValueError if the controller at the address belongs to another run, or refuses this client.

    An absent controller is not an error: the worker serves without one until it appears.
    """
    client = Client(security)
    for last in (False, True):  # try twice if the port is open, because the controller may just be starting
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
            raise UserError(
                f"{address} is taken by {occupant(address, client)}: give --controller the address of this run's controller"
            )
        return
