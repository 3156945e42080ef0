"""Prometheus metrics of the controller, read from the running objects when somebody asks: no cost until then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from speclen.controller.config import ControllerConfig
from speclen.controller.service.journal import Journal
from speclen.controller.service.servicer import ControlServicer
from speclen.controller.service.totals import WAITS_S
from speclen.records import ContextKey
from speclen.transport.pages import MetricsPage, serve_page

PREFIX = "speclen_controller"
READ_TIMEOUT_S = 5.0


class ControllerCollector:
    """Everything under the prefix `speclen_controller_`; docs/controller.md has the table.

    loop: where the controller runs; the page's own threads have the numbers read there, between two of its steps. None
    when the reader is on it already.
    """

    def __init__(
        self, servicer: ControlServicer, journal: Journal, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.learner = servicer.learner
        self.streams = servicer.streams
        self.num_errors = servicer.num_errors
        self.journal = journal
        self.loop = loop

    def collect(self) -> Iterator[Metric]:
        """Raises TimeoutError when the controller does not get to it."""
        if self.loop is None:
            yield from self.read()
        else:
            yield from asyncio.run_coroutine_threadsafe(self._read_there(), self.loop).result(READ_TIMEOUT_S)

    async def _read_there(self) -> list[Metric]:
        return list(self.read())

    def read(self) -> Iterator[Metric]:
        """All metrics, as of this moment."""
        yield from self._reports()
        yield from self._fleet()
        yield from self._disk()
        yield from self._choices()
        yield from self._prediction()
        yield from self._regret()

    def _reports(self) -> Iterator[Metric]:
        totals = self.learner.totals
        yield counter("reports", "Reports learned from", totals.num_reports)
        words = "Workers report 64 consecutive steps out of each 64 times this number"
        yield gauge("sample_every", words, self.learner.sampling.sample_every)
        yield self._waits()
        yield counter("groups", "Groups of reports learned from", totals.num_groups)
        yield counter("reports_repeated", "Reports recognised as repetitions and ignored", totals.num_repeated)
        yield counter(
            "reports_missing", "Reports skipped by gaps in seq, less those that came late", totals.num_missing
        )
        refused = CounterMetricFamily(f"{PREFIX}_reports_refused", "Reports that were not plausible", labels=["reason"])
        for reason, number in totals.refused.items():
            refused.add_metric([reason], number)
        yield refused
        errors = CounterMetricFamily(f"{PREFIX}_call_errors", "Calls that ended badly", labels=["method", "code"])
        for labels, number in self.num_errors.items():
            errors.add_metric(list(labels), number)
        yield errors

    def _waits(self) -> Metric:
        totals = self.learner.totals
        words = "How long a worker's reports waited to be learned from"
        waits = HistogramMetricFamily(f"{PREFIX}_learning_wait_seconds", words)
        bounds = [*map(str, WAITS_S), "+Inf"]
        waits.add_metric([], list(zip(bounds, accumulate(totals.waits), strict=True)), totals.waited_s)
        return waits

    def _fleet(self) -> Iterator[Metric]:
        learner, streams = self.learner, self.streams
        contexts, totals = learner.registry.contexts, learner.totals
        yield gauge("workers", "Workers known", len(learner.registry.workers))
        yield gauge("contexts", "Contexts known", len(contexts))
        yield gauge("streams", "StreamReports calls open", len(streams.open))
        yield counter("decisions", "Changes of the arm in use", totals.num_decisions)
        yield counter("probes", "Exploratory arms handed out", totals.num_probes)
        drift = CounterMetricFamily(f"{PREFIX}_drift_events", "Times something was forgotten", labels=["factor"])
        for factor in ("latency", "acceptance", "reset", "worker"):
            drift.add_metric([factor], totals.drift[factor])
        yield drift
        words = "Workers unlike the others of their context"
        isolated = GaugeMetricFamily(f"{PREFIX}_workers_isolated", words, labels=["context"])
        for key in contexts:
            isolated.add_metric([context_label(key)], learner.estimator.num_isolated(key))
        yield isolated

    def _disk(self) -> Iterator[Metric]:
        journal = self.journal
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
        length = per_bucket("speculation_length", "Speculation length of the arm in use, by range of batch sizes")
        ngram = per_bucket("ngram", "1 where the arm in use proposes n-grams")
        time_per_token = per_bucket("predicted_ms_per_token", "Expected time per token and sequence of the arm in use")
        for key in self.learner.registry.contexts:
            for choice in self.learner.estimator.table(key).choices:
                labels = [context_label(key), bucket_label(choice.batch_min, choice.batch_max)]
                length.add_metric(labels, choice.arm.speculation_length)
                ngram.add_metric(labels, int(choice.arm.ngram))
                if choice.ms_per_token is not None:
                    time_per_token.add_metric(labels, choice.ms_per_token)
        yield from (length, ngram, time_per_token)

    def _prediction(self) -> Iterator[Metric]:
        error = per_bucket("prediction_error_ratio", "Observed over predicted time of recent steps, minus 1")
        steps = per_bucket("compared_steps", "Steps whose time was compared", CounterMetricFamily)
        observed = per_bucket("observed_step_seconds", "Time of these steps", CounterMetricFamily)
        predicted = per_bucket("predicted_step_seconds", "Predicted time for their tokens", CounterMetricFamily)
        for key, prediction in self.learner.prediction.items():
            for sizes, sums in prediction.compared.items():
                labels = [context_label(key), bucket_label(*sizes)]
                error.add_metric(labels, sums.error)
                steps.add_metric(labels, sums.num_steps)
                observed.add_metric(labels, sums.observed_s)
                predicted.add_metric(labels, sums.predicted_s)
        yield from (error, steps, observed, predicted)

    def _regret(self) -> Iterator[Metric]:
        labels = ["context"]
        elsewhere = CounterMetricFamily(
            f"{PREFIX}_other_arm_seconds", "Time of steps at other arms than the one in use", labels=labels
        )
        regret = GaugeMetricFamily(
            f"{PREFIX}_regret_seconds", "How much of that the arm in use would have saved", labels=labels
        )
        for key, prediction in self.learner.prediction.items():
            elsewhere.add_metric([context_label(key)], prediction.elsewhere_s)
            regret.add_metric([context_label(key)], prediction.regret_s)
        yield from (elsewhere, regret)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def per_bucket(
    name: str, text: str, kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily
) -> GaugeMetricFamily | CounterMetricFamily:
    return kind(f"{PREFIX}_{name}", text, labels=["context", "batch_bucket"])


def context_label(key: ContextKey) -> str:
    """The context as the database's views write it."""
    engine = f" [{key.engine_fingerprint}]" if key.engine_fingerprint else ""
    return f"{key.target} + {key.draft} on {key.device}, {key.dtype}{engine}"


def bucket_label(batch_min: int, batch_max: int) -> str:
    """ "4" or "5-8"."""
    return str(batch_min) if batch_min == batch_max else f"{batch_min}-{batch_max}"


def serve_metrics(collector: ControllerCollector, config: ControllerConfig) -> MetricsPage:
    """Serve the page. Raises OSError when the address cannot be used."""
    registry = CollectorRegistry()
    registry.register(collector)
    return serve_page(config.metrics_listen, registry, config.security)
