"""Prometheus metrics of the controller, read from the running objects at each scrape; they cost nothing in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric

from speclen.controller.baseline.guard import bounds_of
from speclen.controller.service.control_servicer import ControlServicer
from speclen.controller.service.journal import Journal
from speclen.process.servers import Families

PREFIX = "speclen_controller"
FAMILIES = Families(PREFIX)
READ_TIMEOUT_S = 5.0
RANGE = ("context", "batch_bucket")
BOUNDS = {"gain_low": ": lower end of the 95% interval", "gain_high": ": upper end of the 95% interval"}

Labelled = dict[tuple[str, ...], float]


class ControllerCollector:
    """All metrics with the prefix `speclen_controller_`; docs/reference/metrics.md lists them.

    loop: of the controller. The threads of the page have the numbers read there, between two callbacks.
    """

    def __init__(self, servicer: ControlServicer, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self.learner = servicer.learner
        self.streams = servicer.streams
        self.num_errors = servicer.num_errors
        self.journal = journal
        self.loop = loop

    def collect(self) -> Iterator[Metric]:
        """Raises TimeoutError if the event loop does not respond."""
        yield from asyncio.run_coroutine_threadsafe(self._read_there(), self.loop).result(READ_TIMEOUT_S)

    async def _read_there(self) -> list[Metric]:
        return list(self.read())

    def read(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        yield from self._reports()
        yield from self._fleet()
        yield from self._disk()
        yield from self._choices()
        yield from self._gain()
        yield from self._prediction()
        yield from self._regret()

    def _reports(self) -> Iterator[Metric]:
        totals = self.learner.totals
        yield FAMILIES.counter("reports", "Reports learned from", totals.num_reports)
        words = "Workers report 64 consecutive steps out of each 64 times this number"
        yield FAMILIES.gauge("sample_every", words, self.learner.sampling.sample_every)
        yield FAMILIES.counter("groups", "Groups of reports learned from", totals.num_groups)
        yield FAMILIES.counter("reports_repeated", "Reports recognised as repetitions and ignored", totals.num_repeated)
        yield FAMILIES.counter(
            "reports_missing", "Reports skipped by gaps in seq, less those that came late", totals.num_missing
        )
        refused = {(reason,): number for reason, number in totals.refused.items()}
        yield FAMILIES.counters("reports_refused", "Reports that were not plausible", ["reason"], refused)
        words = "Calls that ended with an error"
        yield FAMILIES.counters("call_errors", words, ["method", "code"], self.num_errors)

    def _fleet(self) -> Iterator[Metric]:
        learner, totals, registry = self.learner, self.learner.totals, self.learner.registry
        yield FAMILIES.gauge("workers", "Workers known", len(registry.workers))
        yield FAMILIES.gauge("contexts", "Contexts known", len(registry.contexts))
        yield FAMILIES.gauge("streams", "StreamReports calls open", len(self.streams.open))
        yield FAMILIES.counter("decisions", "Changes of the arm in use", totals.num_decisions)
        yield FAMILIES.counter("probes", "Probes sent to workers", totals.num_probes)
        drift = {(factor,): totals.drift[factor] for factor in ("acceptance", "reset", "worker")}
        yield FAMILIES.counters("drift_events", "Times something was forgotten", ["factor"], drift)
        isolated = {(str(key),): learner.estimators[key].num_isolated for key in registry.contexts}
        words = "Outlier workers, isolated from the others of their context"
        yield FAMILIES.gauges("workers_isolated", words, ["context"], isolated)

    def _disk(self) -> Iterator[Metric]:
        journal = self.journal
        yield FAMILIES.gauge(
            "queue_depth", "Reports learned from that are not on disk yet", journal.num_waiting_reports
        )
        yield FAMILIES.gauge("durable_lag_seconds", "Age of the oldest thing that is not on disk yet", journal.lag_s())
        yield FAMILIES.counter("commits", "Commits on disk", journal.num_commits)
        yield FAMILIES.counter("commits_failed", "Commits given up", journal.num_failed_commits)
        health = journal.store.health()
        yield FAMILIES.gauge("store_ok", "1 while commits succeed", int(health.ok))
        yield FAMILIES.gauge("database_bytes", "Size of the database and its WAL", health.database_bytes)
        yield FAMILIES.gauge("last_commit_seconds", "How long the last commit took", health.last_commit_s)
        yield FAMILIES.counter("rows_refused", "Rows that broke a rule of the database", health.num_rows_refused)
        yield FAMILIES.counter(
            "reports_dropped", "Raw reports given up because the disk refused them", journal.num_reports_dropped
        )

    def _choices(self) -> Iterator[Metric]:
        length, ngram, ms_per_token = Labelled(), Labelled(), Labelled()
        for key in self.learner.registry.contexts:
            for choice in self.learner.in_use(key).choices:
                labels = str(key), range_label(choice.batch_min, choice.batch_max)
                length[labels], ngram[labels] = choice.arm
                if choice.ms_per_token is not None:
                    ms_per_token[labels] = choice.ms_per_token
        words = "Expected time per token and sequence of the arm in use"
        yield FAMILIES.gauges("speculation_length", "Speculation length of the arm in use", RANGE, length)
        yield FAMILIES.gauges("ngram", "1 where the arm in use proposes n-grams", RANGE, ngram)
        yield FAMILIES.gauges("predicted_ms_per_token", words, RANGE, ms_per_token)

    def _gain(self) -> Iterator[Metric]:
        """Gain by batch range. The bounds are those of the 95% interval."""
        found: dict[str, Labelled] = {"gain": Labelled(), "gain_low": Labelled(), "gain_high": Labelled()}
        for key in self.learner.registry.contexts:
            for number, place in self.learner.guards.of(key).ranges.items():
                if place.gain is not None and place.gain.freedom >= 1.0:
                    labels = str(key), range_label(*bounds_of(number))
                    figures = place.gain.ratio, *place.gain.interval()
                    for name, figure in zip(found, figures, strict=True):
                        found[name][labels] = figure
        words = "Tokens per second of the learned arms over those of the baseline, by trials"
        for name, values in found.items():
            yield FAMILIES.gauges(name, words + BOUNDS.get(name, ""), RANGE, values)

    def _prediction(self) -> Iterator[Metric]:
        steps, observed, predicted = Labelled(), Labelled(), Labelled()
        for key, prediction in self.learner.prediction.items():
            for sizes, sums in prediction.times.items():
                labels = str(key), range_label(*sizes)
                steps[labels], observed[labels], predicted[labels] = sums.num_steps, sums.observed_s, sums.predicted_s
        yield FAMILIES.counters("compared_steps", "Steps whose time was compared", RANGE, steps)
        yield FAMILIES.counters("observed_step_seconds", "Time of these steps", RANGE, observed)
        words = "Predicted time for their tokens"
        yield FAMILIES.counters("predicted_step_seconds", words, RANGE, predicted)

    def _regret(self) -> Iterator[Metric]:
        found = {(str(key),): each for key, each in self.learner.prediction.items()}
        elsewhere = {labels: each.elsewhere_s for labels, each in found.items()}
        regret = {labels: each.regret_s for labels, each in found.items()}
        words = "Time of steps at other arms than the one in use"
        yield FAMILIES.counters("other_arm_seconds", words, ["context"], elsewhere)
        words = "How much of that the arm in use would have saved"
        yield FAMILIES.gauges("regret_seconds", words, ["context"], regret)


def range_label(batch_min: int, batch_max: int) -> str:
    """ "4" or "5-8"."""
    return str(batch_min) if batch_min == batch_max else f"{batch_min}-{batch_max}"
