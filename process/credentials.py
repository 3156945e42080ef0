"""Authentication: TLS certificates, or a bearer token on every method, including health and reflection."""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from speclen.process.settings import UNIX, is_loopback, setting, split_address

MIN_TOKEN_LENGTH = 16  # characters; shorter ones can be guessed


class Keyring:
    """The bearer tokens that a server accepts, and their holders.

    A token is compared by its digest with all accepted ones in constant time, so neither its length nor a prefix leaks.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._expected = [digest(f"Bearer {token}") for token in tokens]

    def caller(self, header: str | bytes) -> str | None:
        """Holder of the token in this `authorization` header: None if it is wrong, "" if there is only one token."""
        given, found = digest(as_expected(header)), None
        for expected in self._expected:
            if hmac.compare_digest(given, expected):
                found = f"token:{expected.hex()[:16]}"
        return found if found is None or len(self._expected) > 1 else ""

    def caller_in(self, headers: Any) -> str | None:
        """Holder of the token in HTTP headers or gRPC metadata, which must contain exactly one `authorization`."""
        given = [value for name, value in headers or () if name in ("authorization", b"authorization")]
        return self.caller(given[0]) if len(given) == 1 else None


def as_expected(header: str | bytes) -> bytes:
    """The header in canonical form: the scheme's case and the spaces after it do not matter (RFC 9110, 11.4)."""
    given = header.encode() if isinstance(header, str) else header
    scheme, _, token = given.partition(b" ")
    return b"Bearer " + token.lstrip(b" ") if scheme.lower() == b"bearer" else given


def digest(text: str | bytes) -> bytes:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """TLS and token settings of every server. Raises ValueError, naming the flags, if a combination cannot work."""

    tls_cert: Path | None = setting(None, "Certificate chain, PEM.")
    tls_key: Path | None = setting(None, "Key of the certificate, PEM.")
    tls_client_ca: Path | None = setting(None, "Clients must show a certificate of this authority, PEM.")
    token_file: Path | None = setting(None, "File with bearer tokens, one per line; every call must carry one.")
    read_token_file: Path | None = setting(None, "File with further tokens, for calls that only read.")
    insecure: bool = setting(False, "Allow an address other than loopback without TLS and authentication.")

    def __post_init__(self) -> None:
        if self.read_token_file is not None and self.token_file is None:
            raise ValueError("--read-token-file needs --token-file: without it anyone may call everything")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key: give all three")

    def check_exposure(self, flag: str, address: str, tokens: bool = True) -> None:
        """Raise ValueError if other machines can reach the address and nothing protects it.

        tokens: True if a bearer token counts as protection, as well as a client certificate.
        """
        if address.startswith(UNIX):
            return
        proven = self.tls_client_ca is not None or (tokens and self.token_file is not None)
        if is_loopback(split_address(flag, address)[0]) or self.insecure or (self.tls_cert is not None and proven):
            return
        raise ValueError(
            f"{flag} {address} is open to other machines: give --tls-cert and --tls-key with --tls-client-ca"
            f"{' or --token-file' if tokens else ''}, use 127.0.0.1, or accept the risk with --insecure"
        )

    def credentials(self) -> grpc.ServerCredentials | None:
        """The configured certificates; None for a server without TLS. Raises ValueError if they cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        client_ca = None if self.tls_client_ca is None else read_authority("--tls-client-ca", self.tls_client_ca)
        return grpc.ssl_server_credentials(
            [read_pair("--tls-key", self.tls_key, "--tls-cert", self.tls_cert)],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )

    def interceptors(self) -> list[aio.ServerInterceptor]:
        """The token check, if tokens are configured. Raises ValueError if their files cannot be used."""
        keyring = self.keyring()
        if keyring is None:
            return []
        if self.read_token_file is None:
            return [TokenInterceptor(keyring)]
        reading = read_tokens("--read-token-file", self.read_token_file)
        if any(keyring.caller(f"Bearer {token}") is not None for token in reading):
            raise ValueError(
                "--read-token-file holds a token of --token-file: give read-only callers a token of their own"
            )
        return [TokenInterceptor(keyring, Keyring(reading))]

    def keyring(self, flag: str = "--token-file") -> Keyring | None:
        """The accepted tokens, if any are configured. Raises ValueError if their file cannot be used."""
        return None if self.token_file is None else Keyring(read_tokens(flag, self.token_file))

    def add_port(self, server: aio.Server, address: str) -> int:
        """Bind the server, with TLS if configured, and return the port. Raises OSError if the address is taken."""
        credentials = self.credentials()
        try:
            if credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: is it taken? Choose another with --listen") from error


# Prefixes of methods that change nothing: our own, health's, and reflection's.
READING = ("Get", "Check", "Watch", "List", "ServerReflectionInfo")


class TokenInterceptor(aio.ServerInterceptor):
    """Refuses calls without `authorization: Bearer TOKEN`. reading: tokens for calls that change nothing."""

    def __init__(self, keyring: Keyring, reading: Keyring | None = None) -> None:
        self._keyring, self._reading = keyring, reading

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata, method = handler_call_details.invocation_metadata, handler_call_details.method.rpartition("/")[2]
        if self._keyring.caller_in(metadata) is not None:
            return await continuation(handler_call_details)
        if self._reading is None or self._reading.caller_in(metadata) is None:
            return refusing(grpc.StatusCode.UNAUTHENTICATED, "send the metadata `authorization: Bearer TOKEN`")
        if method.startswith(READING):
            return await continuation(handler_call_details)
        return refusing(grpc.StatusCode.PERMISSION_DENIED, "this token is read-only")


def refusing(code: grpc.StatusCode, words: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Handler that answers any call with the status code. Unknown and known methods get the same answer."""

    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(code, words)

    return grpc.stream_stream_rpc_method_handler(refuse)


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """Credential settings of every client. prefix: of the flags that errors name."""

    ca: Path | None = setting(None, "Authority of the server's certificate, PEM: speak TLS.")
    cert: Path | None = setting(None, "Certificate to show to the server, PEM.")
    key: Path | None = setting(None, "Key of that certificate, PEM.")
    token_file: Path | None = setting(None, "File with the server's bearer token.")
    prefix: str = "--"

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of the channel; None without TLS. Raises ValueError if files are missing or cannot be used."""
        ca, cert, key = (f"{self.prefix}{name}" for name in ("ca", "cert", "key"))
        if (self.cert is None) != (self.key is None):
            raise ValueError(f"{cert} and {key} belong together: give both or none")
        if self.ca is None:
            if self.cert is not None:
                raise ValueError(f"{cert} needs {ca}, the authority of the server, as well")
            return None
        own = () if self.cert is None or self.key is None else read_pair(key, self.key, cert, self.cert)
        return grpc.ssl_channel_credentials(read_authority(ca, self.ca), *own)

    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Metadata of every call: the token, if any. Raises ValueError if it cannot be read."""
        if self.token_file is None:
            return ()
        return (("authorization", f"Bearer {read_token(f'{self.prefix}token-file', self.token_file)}"),)


def read_tokens(flag: str, path: Path) -> list[str]:
    """The tokens in a file, one per line, without empty lines and comments (#). Raises ValueError if there are none."""
    lines = [line.strip() for line in read_file(flag, path).decode("utf-8", errors="replace").splitlines()]
    return [check_token(flag, path, line) for line in lines if line and not line.startswith("#")] or [
        check_token(flag, path, "")
    ]


def read_token(flag: str, path: Path) -> str:
    """The token in a file, without surrounding space. Raises ValueError if it cannot be read or is too weak."""
    return check_token(flag, path, read_file(flag, path).decode("utf-8", errors="replace").strip())


def check_token(flag: str, path: Path, token: str) -> str:
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"{flag} {path} must hold at least {MIN_TOKEN_LENGTH} printable ASCII characters: "
            "make one with `openssl rand -hex 32`"
        )
    return token


def read_file(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def read_authority(flag: str, path: Path) -> bytes:
    """Certificates in a PEM file. Raises ValueError if there are none: gRPC would log pages and refuse every peer."""
    content = read_file(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ValueError(
            f"{flag} {path} holds no certificates in PEM that can be read: name the authority's file"
        ) from None
    return content


def read_pair(key_flag: str, key: Path, cert_flag: str, cert: Path) -> tuple[bytes, bytes]:
    """Key and certificate chain, in gRPC's order. Raises ValueError if one is not PEM, or if they do not match."""
    contents = read_file(key_flag, key), read_file(cert_flag, cert)
    for flag, path, content, word in (
        (key_flag, key, contents[0], "KEY"),
        (cert_flag, cert, contents[1], "CERTIFICATE"),
    ):
        if not re.search(rf"-----BEGIN ([A-Z0-9]+ )*{word}-----".encode(), content):
            raise ValueError(f"{flag} {path} holds no {word.lower()} in PEM: was it swapped with another file?")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        pair, reason = f"{key_flag} {key} and {cert_flag} {cert}", error.reason or "damaged, or with a password"
        if reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{pair} do not belong together: give the certificate with its own key") from None
        raise ValueError(f"{pair} cannot be used ({reason}): give PEM files without a password") from None
    return contents
