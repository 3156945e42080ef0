"""Prometheus metrics of a worker, under vLLM's names with the prefix `speclen_`.

Counters and gauges are read at a scrape; the rest is updated on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric

from speclen.transport.credentials import ServerSecurity
from speclen.transport.families import Families
from speclen.transport.pages import serve_page
from speclen.worker.engine.engine import Engine
from speclen.worker.reporting.control_client import ControlClient

FAMILIES = Families("speclen")


class WorkerMetrics:
    """The worker's registry and its page."""

    def __init__(
        self,
        engine: Engine,
        control: ControlClient,
        num_failures: dict[str, int] | None = None,
        num_at_admission: Callable[[], int] = lambda: 0,
    ) -> None:
        """num_failures: restarts of each part of the process."""
        self.registry = CollectorRegistry()
        num_failures = {} if num_failures is None else num_failures
        self.registry.register(EngineCollector(engine, control, num_failures, num_at_admission))
        self._thread: threading.Thread | None = None  # serves the page
        self.slow_readers = Counter(
            "speclen_slow_readers", "Requests ended since their client read nothing", registry=self.registry
        )

    def serve(
        self,
        address: str,
        security: ServerSecurity = ServerSecurity(),  # noqa: B008
        page: CollectorRegistry | None = None,
    ) -> None:
        """Serve the page, by default this registry, on HOST:PORT from a thread.

        Raises OSError when the port is taken, ValueError for no address.
        """
        self._thread = serve_page(address, self.registry if page is None else page, security).thread

    async def keep_page(self, address: str, security: ServerSecurity, page: CollectorRegistry) -> None:
        """Serve the page, if it is not served, until its thread ends. Raises as `serve`."""
        if self._thread is None or not self._thread.is_alive():
            self.serve(address, security, page)
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(1.0)


class EngineCollector:
    """Collector of the engine's and the control client's counts."""

    def __init__(
        self, engine: Engine, control: ControlClient, num_failures: dict[str, int], num_at_admission: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._control = control
        self._num_failures = num_failures
        self._num_at_admission = num_at_admission

    def collect(self) -> Iterator[Metric]:
        load, control = self._engine.load(), self._control
        yield FAMILIES.gauge("num_requests_running", "Requests being decoded or prefilled", load.num_running)
        yield FAMILIES.gauge(
            "num_requests_waiting", "Requests waiting for a slot", load.num_waiting + self._num_at_admission()
        )
        usage = load.num_kv_tokens_used / load.num_kv_tokens_total if load.num_kv_tokens_total else 0.0
        yield FAMILIES.gauge("kv_cache_usage_perc", "Share of KV tokens in use", usage)
        yield FAMILIES.counter("prefix_cache_queries", "Prompt tokens that were looked up", load.num_looked_up_tokens)
        yield FAMILIES.counter(
            "prefix_cache_hits", "Prompt tokens that were cached and not prefilled", load.num_reused_tokens
        )
        yield FAMILIES.counter("generation_tokens", "Tokens generated", load.num_generated_tokens)
        yield FAMILIES.counter(
            "spec_decode_num_drafts", "Proposals verified, of one sequence in one step", load.num_drafts
        )
        yield FAMILIES.counter("spec_decode_num_draft_tokens", "Tokens proposed", load.num_draft_tokens)
        yield FAMILIES.counter("spec_decode_num_ngram_tokens", "N-gram tokens proposed", load.num_ngram_tokens)
        yield FAMILIES.counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted", load.num_accepted_tokens)
        by_position = {(str(at),): number for at, number in enumerate(load.num_accepted_by_position)}
        words = "Proposed tokens accepted, by position"
        yield FAMILIES.counters("spec_decode_num_accepted_tokens_per_pos", words, ["position"], by_position)
        yield FAMILIES.gauge("cpu_threads", "CPU threads that the models use", self._engine.num_threads)
        yield FAMILIES.counter("decode_steps", "Decoding steps", load.num_steps)
        yield FAMILIES.counter(
            "decode_step_seconds", "Wall time of decoding steps, all that belongs to them", control.step_s
        )
        yield from arms(control)
        yield FAMILIES.gauge("controller_connected", "1 while reports reach the controller", float(control.connected))
        yield FAMILIES.gauge("reports_buffered", "Reports kept until durable", len(control.buffer))
        yield FAMILIES.counter("reports_dropped", "Reports given up for lack of room", control.buffer.num_dropped)
        yield FAMILIES.counter("reports_refused", "Reports the controller refused", control.num_refused)
        failures = {(part,): number for part, number in sorted(dict(self._num_failures).items())}
        yield FAMILIES.counters("part_failures", "Parts that ended and were started again", ["part"], failures)


def arms(control: ControlClient) -> Iterator[Metric]:
    """The table in use, by range of batch sizes."""
    labels = ["batch_min", "batch_max"]
    by_sizes = {(str(each.batch_min), str(each.batch_max)): each.arm for each in control.table.choices}
    lengths = {sizes: arm.speculation_length for sizes, arm in by_sizes.items()}
    ngrams = {sizes: float(arm.ngram) for sizes, arm in by_sizes.items()}
    yield FAMILIES.gauges("speculation_length", "Draft tokens of the arm in use", labels, lengths)
    yield FAMILIES.gauges("ngram", "1 where the arm in use has n-grams", labels, ngrams)


class Labelled:
    """Collector of another registry, with labels added to every sample."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            samples = [sample._replace(labels=self._labels | sample.labels) for sample in metric.samples]
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = samples
            yield labelled


def page_of(registry: CollectorRegistry, model_name: str) -> CollectorRegistry:
    """The registry of the page: the given one, labelled, and the process's."""
    page = CollectorRegistry()
    page.register(Labelled(registry, {"model_name": model_name}))
    ProcessCollector(registry=page)
    PlatformCollector(registry=page)
    return page
