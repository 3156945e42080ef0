"""Certificates for one test, made by openssl: an authority, a server of 127.0.0.1 and localhost, a client, a stranger."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    cert: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """All signed by `authority`, but the stranger, which signed itself."""

    authority: Pair
    server: Pair
    client: Pair
    stranger: Pair


def make_certificates(folder: Path) -> Certificates:
    """Fresh ones, valid for a day."""
    authority = self_signed(folder, "authority")
    server = signed(folder, "server", authority, "subjectAltName=IP:127.0.0.1,DNS:localhost")
    client = signed(folder, "client", authority, "subjectAltName=DNS:client")
    return Certificates(authority, server, client, self_signed(folder, "stranger"))


def self_signed(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    openssl("req", "-x509", *new_key(pair.key), "-days", "1", "-subj", f"/CN={name}", "-out", str(pair.cert))
    return pair


def signed(folder: Path, name: str, authority: Pair, extension: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / "ext"
    extensions.write_text(extension)
    openssl("req", *new_key(pair.key), "-subj", f"/CN={name}", "-out", str(request))
    by = ("-CA", str(authority.cert), "-CAkey", str(authority.key), "-CAcreateserial")
    openssl("x509", "-req", "-in", str(request), *by, "-days", "1", "-extfile", str(extensions), "-out", str(pair.cert))
    return pair


def new_key(path: Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path))


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
