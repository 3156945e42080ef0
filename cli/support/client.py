"""Connections of every verb to the servers: one configuration of addresses, TLS and token, and one form of errors."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc

from speclen.cli.support.errors import UserError, user_errors
from speclen.transport.address import past_proxies, split_address
from speclen.transport.credentials import ClientSecurity
from speclen.transport.settings import settings_of

# A request whose worker is gone before anything came of it is sent once more; gRPC never repeats one that has begun to
# stream. Ray's proxy says INTERNAL for a worker that died, and so does a worker whose step failed.
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
WORKER = "127.0.0.1:7080"  # where one listens by default


class Client:
    """Channels to our servers, with TLS and token as configured. Raises UserError for files that cannot be used."""

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self.security = security or ClientSecurity()
        with user_errors():
            self._credentials, metadata = self.security.credentials(), self.security.metadata()
        self._interceptors = [Bearer(metadata)] if metadata else []

    def channel(self, address: str, flag: str = "--worker") -> grpc.Channel:
        """A channel whose calls carry the token. Raises UserError for something else than HOST:PORT."""
        with user_errors():
            split_address(flag, address)
        options = [*OPTIONS, *past_proxies(address)]
        if self._credentials is None:
            channel = grpc.insecure_channel(address, options)
        else:
            channel = grpc.secure_channel(address, self._credentials, options)
        return grpc.intercept_channel(channel, *self._interceptors)

    @contextlib.contextmanager
    def calling(self, kind: str, address: str) -> Iterator[grpc.Channel]:
        """A channel to the worker or controller (`kind`) at an address; a call that fails is a UserError."""
        with self.channel(address, f"--{kind}") as channel:
            try:
                yield channel
            except grpc.RpcError as error:
                raise UserError(self.explain(error, kind, address)) from error

    def explain(self, error: grpc.RpcError, kind: str, address: str) -> str:
        """One sentence for a call to the worker or controller (`kind`) at an address that failed."""
        assert isinstance(error, grpc.Call)
        code, details, prefix = error.code(), error.details() or "", self.security.prefix
        if code is grpc.StatusCode.UNAVAILABLE:
            return self._unreachable(kind, address, details)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            if self.security.token_file is None:
                return f"the {kind} at {address} wants a token: give the file that holds it with {prefix}token-file"
            return f"the {kind} at {address} rejects the token in {self.security.token_file}: give its own"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return f"{address} is not a speclen {kind}: give the address of one with --{kind}"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the {kind} at {address} did not answer in time: try again, or look at its log"
        return f"the {kind} at {address} answered {code.name}: {details}"

    def _unreachable(self, kind: str, address: str, details: str) -> str:
        ca, prefix = self.security.ca, self.security.prefix
        if any(words in details for words in ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification", "match target")):
            return f"{prefix}ca {ca} does not verify the {kind} at {address}: give the authority of its certificate"
        if not is_listening(address):
            return f"no {kind} answers at {address}: start one with `speclen up`, or name its address with --{kind}"
        if ca is None:
            return f"no {kind} answers at {address}, though something listens: if it has TLS, give {prefix}ca"
        return (
            f"{address} listens and refuses our TLS: drop {prefix}ca if the {kind} has none, "
            f"give {prefix}cert and {prefix}key if it wants a certificate"
        )


def client_from(settings: dict[str, Any]) -> Client:
    """The client of a verb's settings; other settings are left alone."""
    return Client(ClientSecurity(**{name: settings[name] for name in settings_of(ClientSecurity)}))


def is_listening(address: str, timeout_s: float = 0.5) -> bool:
    """True if anything takes connections there."""
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection(split_address("--worker", address), timeout_s).close()
        return True
    return False


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Gives every call the token."""

    def __init__(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        metadata = (*(client_call_details.metadata or ()), *self._metadata)
        return continuation(client_call_details._replace(metadata=metadata), request)  # it is a named tuple

    intercept_unary_stream = intercept_unary_unary
