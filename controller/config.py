"""Settings of the controller, checked as a whole: a value that cannot work is an error before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speclen.transport.address import check_exposure
from speclen.transport.credentials import ServerSecurity, check_pages
from speclen.transport.settings import check_bounds, setting


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Everything that `speclen controller` can be told. Raises ValueError with one sentence that names the flag."""

    listen: str = setting("127.0.0.1:7070", "Address of the service, HOST:PORT; port 0 for a free one.")
    db: Path | None = setting(None, "Database file; default: speclen.db in the data directory.")
    data_dir: Path = setting(Path(".speclen"), "Folder of the database.")
    metrics_listen: str = setting("", "Address of the Prometheus page; empty for none.")
    probe_listen: str = setting(
        "", "Address where health alone answers, without TLS or token: for probes; empty for none."
    )
    policy: str = setting("adaptive", "adaptive, profile, fixed:K or none.")
    # What a crash costs a worker in reports that it sends again.
    commit_interval_s: float = setting(1.0, "Seconds between commits.", least=0.001)
    keep_reports: int = setting(5_000_000, "Raw reports kept at most.", least=1)
    keep_days: float = setting(30.0, "Days for which raw reports are kept.", least=0.001)
    max_streams: int = setting(4096, "Streams open at once.", least=1)
    max_workers: int = setting(65_536, "Workers ever known, about 1 kB each.", least=1)
    max_contexts: int = setting(1024, "Contexts ever known; each has an estimator of its own.", least=1)
    silence_s: float = setting(30.0, "Seconds after which a stream without messages is ended.", least=0.001)
    drain_timeout_s: float = setting(10.0, "Seconds that the last commit has after SIGTERM.", least=0)
    move_corrupt_aside: bool = setting(False, "Rename a damaged database and start anew.")
    log_level: str = setting("info", "Least level that is logged: debug, info, warning or error.")
    tls_cert: Path | None = setting(None, "Certificate chain, PEM.")
    tls_key: Path | None = setting(None, "Key of the certificate, PEM.")
    tls_client_ca: Path | None = setting(None, "Clients must show a certificate of this authority, PEM.")
    token_file: Path | None = setting(None, "File with bearer tokens, one per line; every call must carry one.")
    read_token_file: Path | None = setting(None, "File with further tokens, for calls that only read.")
    insecure: bool = setting(False, "Allow an address other than loopback without TLS and authentication.")
    run_id: str = setting("", "Name of the run that this belongs to: workers that expect another are refused.")

    def __post_init__(self) -> None:
        check_bounds(self)
        security = self.security
        check_exposure("--listen", self.listen, security.encrypted, security.authenticated, self.insecure)
        if self.metrics_listen:
            check_pages(self.metrics_listen, security, self.insecure)

    @property
    def security(self) -> ServerSecurity:
        """TLS and token. Raises ValueError for a combination that cannot work."""
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, self.token_file, self.read_token_file)

    @property
    def database(self) -> Path:
        """The database file."""
        return self.db if self.db is not None else self.data_dir / "speclen.db"
