"""Settings of the controller, checked as a whole: a value that cannot work is an error before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speclen.transport.address import check_exposure
from speclen.transport.credentials import ServerSecurity


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Everything that `speclen controller` can be told. Raises ValueError with one sentence that names the flag."""

    listen: str = "127.0.0.1:7070"  # address of ControlService, health and reflection
    data_dir: Path = Path(".speclen")  # folder of the database
    db: Path | None = None  # database file; None: speclen.db in data_dir
    in_memory: bool = False  # no database: everything learned is gone at the end (for measurements)
    metrics_listen: str = ""  # address of the Prometheus page; empty: none
    policy: str = "adaptive"  # how lengths are chosen
    seed: int = 0  # of the estimator's random generator: same seed, same reports, same decisions
    commit_interval_s: float = 1.0  # seconds between commits: what a crash costs a worker in resent reports
    keep_reports: int = 5_000_000  # raw reports kept at most
    keep_days: float = 30.0  # days for which raw reports are kept at most
    max_streams: int = 4096  # streams open at once
    max_workers: int = 65_536  # workers ever known, about 1 kB each
    max_contexts: int = 1024  # contexts ever known; each has an estimator of its own
    silence_s: float = 30.0  # a stream without any message for this long is ended
    drain_timeout_s: float = 10.0  # SIGTERM: the last commit has this long
    move_corrupt_aside: bool = False  # rename a damaged database and start anew
    tls_cert: Path | None = None  # certificate chain, PEM
    tls_key: Path | None = None  # its key, PEM
    tls_client_ca: Path | None = None  # clients must show a certificate that this one signed, PEM
    token_file: Path | None = None  # file with the bearer token that every call must carry
    insecure: bool = False  # allow an address other than loopback without encryption and authentication

    def __post_init__(self) -> None:
        positive = ("commit_interval_s", "keep_reports", "keep_days", "max_streams", "max_workers", "max_contexts")
        for name in (*positive, "silence_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}; it must be positive")
        if self.drain_timeout_s < 0:
            raise ValueError(f"--drain-timeout-s is {self.drain_timeout_s}; it must not be negative")
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}; it must not be negative")
        encrypted, listens = self.security.encrypted, [("--listen", self.listen, self.security.authenticated)]
        if self.metrics_listen:
            # The Prometheus page knows no token: beyond loopback it wants certificates of its readers.
            listens.append(("--metrics-listen", self.metrics_listen, self.tls_client_ca is not None))
        for name, address, authenticated in listens:
            check_exposure(name, address, encrypted, authenticated, self.insecure)

    @property
    def security(self) -> ServerSecurity:
        """TLS and token. Raises ValueError for a combination that cannot work."""
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, self.token_file)

    @property
    def database(self) -> Path:
        """The database file."""
        return self.db if self.db is not None else self.data_dir / "speclen.db"


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
