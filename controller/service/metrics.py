"""Prometheus metrics of the controller, read from the running objects when somebody asks: no cost until then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from speclen.controller.config import ControllerConfig
from speclen.controller.estimator.core import Bucket, ContextKey
from speclen.controller.service.servicer import ControlServicer
from speclen.transport.address import split_address

PREFIX = "speclen_controller"


class ControllerCollector:
    """Everything under the prefix `speclen_controller_`; docs/controller.md has the table.

    Runs on the page's own thread while the event loop goes on: it only reads numbers and copies of collections.
    """

    def __init__(self, servicer: ControlServicer) -> None:
        self.servicer = servicer

    def collect(self) -> Iterator[Metric]:
        yield from self._reports()
        yield from self._fleet()
        yield from self._disk()
        yield from self._choices()

    def _reports(self) -> Iterator[Metric]:
        totals = self.servicer.fleet.totals
        yield counter("reports", "Reports learned from", totals.num_reports)
        yield counter("groups", "Groups of reports learned from", totals.num_groups)
        yield counter("reports_repeated", "Reports recognised as repetitions and ignored", totals.num_repeated)
        yield counter(
            "reports_missing", "Reports skipped by gaps in seq, less those that came late", totals.num_missing
        )
        refused = CounterMetricFamily(f"{PREFIX}_reports_refused", "Reports that were not plausible", labels=["reason"])
        for reason, number in list(totals.refused.items()):
            refused.add_metric([reason], number)
        yield refused
        errors = CounterMetricFamily(f"{PREFIX}_call_errors", "Calls that ended badly", labels=["method", "code"])
        for labels, number in list(self.servicer.num_errors.items()):
            errors.add_metric(list(labels), number)
        yield errors

    def _fleet(self) -> Iterator[Metric]:
        fleet, streams = self.servicer.fleet, self.servicer.streams
        yield gauge("workers", "Workers known", len(fleet.registry.workers))
        yield gauge("contexts", "Contexts known", len(fleet.registry.contexts))
        yield gauge("streams", "StreamReports calls open", len(streams.open))
        yield counter("decisions", "Changes of a bucket's length", fleet.totals.num_decisions)
        yield counter("probes", "Exploratory lengths handed out", fleet.totals.num_probes)
        drift = CounterMetricFamily(f"{PREFIX}_drift_events", "Times a drift detector fired", labels=["factor"])
        for factor in ("latency", "acceptance"):
            drift.add_metric([factor], fleet.totals.drift[factor])
        yield drift

    def _disk(self) -> Iterator[Metric]:
        journal = self.servicer.fleet.journal
        yield gauge("queue_depth", "Reports learned from that are not on disk yet", journal.num_waiting_reports)
        yield gauge("durable_lag_seconds", "Age of the oldest thing that is not on disk yet", journal.lag_s())
        yield counter("commits", "Commits on disk", journal.num_commits)
        yield counter("commits_failed", "Commits given up", journal.num_failed_commits)
        if journal.store is None:
            return
        health = journal.store.health()
        yield gauge("store_ok", "1 while commits succeed", int(health.ok))
        yield gauge("database_bytes", "Size of the database and its WAL", health.database_bytes)
        yield gauge("last_commit_seconds", "How long the last commit took", health.last_commit_s)
        yield counter("rows_refused", "Rows that broke a rule of the database", health.num_rows_refused)
        yield counter("reports_dropped", "Raw reports given up since the disk refused", health.num_reports_dropped)

    def _choices(self) -> Iterator[Metric]:
        fleet = self.servicer.fleet
        length = per_bucket("speculation_length", "Length in use, by bucket of batch sizes")
        time_per_token = per_bucket("predicted_ms_per_token", "Expected time per token and row at that length")
        error = per_bucket("prediction_error_ratio", "Observed over predicted time of recent steps, minus 1")
        for key in list(fleet.registry.contexts):
            name = context_label(key)
            for choice in fleet.estimator.table(key).choices:
                labels = [name, bucket_label(choice.bucket)]
                length.add_metric(labels, choice.speculation_length)
                if choice.ms_per_token is not None:
                    time_per_token.add_metric(labels, choice.ms_per_token)
            if key in fleet.prediction:
                for bucket, ratio in fleet.prediction[key].by_bucket().items():
                    error.add_metric([name, bucket_label(bucket)], ratio)
        yield from (length, time_per_token, error)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def per_bucket(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["context", "batch_bucket"])


def context_label(key: ContextKey) -> str:
    """The context as the database's views write it."""
    engine = f" [{key.engine_fingerprint}]" if key.engine_fingerprint else ""
    return f"{key.target} + {key.draft} on {key.device}, {key.dtype}{engine}"


def bucket_label(bucket: Bucket) -> str:
    """ "4" or "5-8"."""
    return str(bucket.batch_min) if bucket.batch_min == bucket.batch_max else f"{bucket.batch_min}-{bucket.batch_max}"


def serve_metrics(servicer: ControlServicer, config: ControllerConfig) -> tuple[str, Any]:
    """Serve the page from a thread; returns its address, with the real port, and the server.

    Raises OSError when the address cannot be used.
    """
    host, port = split_address("--metrics-listen", config.metrics_listen)
    registry = CollectorRegistry()
    registry.register(ControllerCollector(servicer))
    tls = config.security.of_pages()
    try:
        server, _ = start_http_server(port, addr=host, registry=registry, **tls)
    except OSError as error:
        raise OSError(
            f"cannot listen on {config.metrics_listen}: {error.strerror}; choose another with --metrics-listen"
        ) from error
    scheme = "https" if tls else "http"
    return f"{scheme}://{host}:{server.server_port}/metrics", server
