"""Settings of the controller, checked as a whole: a value that cannot work is an error before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speclen.process.credentials import ServerSecurity
from speclen.process.settings import check_bounds, setting


@dataclass(frozen=True, slots=True)
class ControllerConfig(ServerSecurity):
    """Settings of `speclen controller`. Raises ValueError with one sentence that names the flag."""

    listen: str = setting("127.0.0.1:7070", "Address of the service, HOST:PORT or unix:FILE; port 0 for a free one.")
    db: Path | None = setting(None, "Database file; default: speclen.db in the data directory.")
    data_dir: Path = setting(Path(".speclen"), "Folder of the database.")
    metrics_listen: str = setting("", "Address of the Prometheus page; empty for none.")
    probe_listen: str = setting(
        "", "Address where health alone answers, without TLS or token: for probes; empty for none."
    )
    policy: str = setting("adaptive", "adaptive only: other policies are set by `speclen worker --policy`.")
    # After a crash of the controller, workers send the reports of up to this many seconds again.
    commit_interval_s: float = setting(1.0, "Seconds between commits.", least=0.001)
    keep_reports: int = setting(5_000_000, "Raw reports kept at most.", least=1)
    keep_days: float = setting(30.0, "Days for which raw reports are kept.", least=0.001)
    max_streams: int = setting(4096, "Streams open at once.", least=1)
    max_workers: int = setting(65_536, "Workers ever known, about 1 kB each.", least=1)
    max_contexts: int = setting(1024, "Contexts ever known; each has an estimator of its own.", least=1)
    silence_s: float = setting(30.0, "Seconds after which a stream without messages is ended.", least=0.001)
    drain_timeout_s: float = setting(10.0, "Seconds that the last commit has after SIGTERM.", least=0)
    move_corrupt_aside: bool = setting(False, "Rename a damaged database and start with an empty one.")
    log_level: str = setting("info", "Least level that is logged: debug, info, warning or error.")
    embedded: bool = setting(False, "Run in the background, and exit once no program uses this controller.")
    run_id: str = setting("", "Name of the run that this belongs to: workers that expect another are refused.")

    def __post_init__(self) -> None:
        ServerSecurity.__post_init__(self)
        check_bounds(self)
        if self.policy != "adaptive":
            raise ValueError(f"--policy {self.policy} is a worker's: use `speclen worker --policy {self.policy}`")
        self.check_exposure("--listen", self.listen)
        if self.metrics_listen:
            self.check_exposure("--metrics-listen", self.metrics_listen, tokens=False)

    @property
    def database(self) -> Path:
        """The database file."""
        return self.db if self.db is not None else self.data_dir / "speclen.db"
