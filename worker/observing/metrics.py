"""Prometheus metrics of a worker, under the names that vLLM made common, with the prefix `speclen_`.

Counts and gauges are read when somebody asks; the rest is fed on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from speclen.transport.credentials import ServerSecurity
from speclen.transport.pages import serve_page
from speclen.worker.engine.engine import Engine
from speclen.worker.reporting.control_client import ControlClient


class WorkerMetrics:
    """The worker's registry, and the page that shows it."""

    def __init__(
        self,
        engine: Engine,
        control: ControlClient,
        num_failures: dict[str, int] | None = None,
        num_at_entrance: Callable[[], int] = lambda: 0,
    ) -> None:
        """num_failures: how often each part of the process ended and was started again."""
        self.registry = CollectorRegistry()
        num_failures = {} if num_failures is None else num_failures
        self.registry.register(EngineCollector(engine, control, num_failures, num_at_entrance))
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
        """Serve the page, if it is not served, and return when its thread has ended. Raises as `serve`."""
        if self._thread is None or not self._thread.is_alive():
            self.serve(address, security, page)
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(1.0)


class EngineCollector:
    """Reads the engine's and the control client's own numbers when Prometheus asks."""

    def __init__(
        self, engine: Engine, control: ControlClient, num_failures: dict[str, int], num_at_entrance: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._control = control
        self._num_failures = num_failures
        self._num_at_entrance = num_at_entrance

    def collect(self) -> Iterator[Metric]:
        load, control = self._engine.load(), self._control
        yield gauge("num_requests_running", "Requests being decoded or prefilled", load.num_running)
        yield gauge("num_requests_waiting", "Requests waiting for a slot", load.num_waiting + self._num_at_entrance())
        usage = load.num_kv_tokens_used / load.num_kv_tokens_total if load.num_kv_tokens_total else 0.0
        yield gauge("kv_cache_usage_perc", "Share of KV tokens in use", usage)
        yield counter("prefix_cache_queries", "Prompt tokens that were looked up", load.num_looked_up_tokens)
        yield counter("prefix_cache_hits", "Prompt tokens that were cached and not prefilled", load.num_reused_tokens)
        yield counter("generation_tokens", "Tokens generated", load.num_generated_tokens)
        yield counter("spec_decode_num_drafts", "Proposals verified, of one sequence in one step", load.num_drafts)
        yield counter("spec_decode_num_draft_tokens", "Tokens proposed", load.num_draft_tokens)
        yield counter("spec_decode_num_ngram_tokens", "N-gram tokens proposed", load.num_ngram_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted", load.num_accepted_tokens)
        yield per_position(load.num_accepted_by_position)
        yield gauge("cpu_threads", "CPU threads that the models use", self._engine.num_threads)
        yield counter("decode_steps", "Decoding steps", load.num_steps)
        yield counter("decode_step_seconds", "Wall time of decoding steps, all that belongs to them", control.step_s)
        yield from arms(control)
        yield gauge("controller_connected", "1 while reports reach the controller", float(control.connected))
        yield gauge("reports_buffered", "Reports kept until durable", len(control.buffer))
        yield counter("reports_dropped", "Reports given up for lack of room", control.buffer.num_dropped)
        yield counter("reports_refused", "Reports the controller refused", control.num_refused)
        yield failures(self._num_failures)


def failures(num_failures: dict[str, int]) -> Metric:
    family = CounterMetricFamily("speclen_part_failures", "Parts that ended and were started again", labels=["part"])
    for part, number in sorted(dict(num_failures).items()):
        family.add_metric([part], number)
    return family


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"speclen_{name}", text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"speclen_{name}", text, value=value)


def per_position(num_accepted: Sequence[int]) -> Metric:
    family = CounterMetricFamily(
        "speclen_spec_decode_num_accepted_tokens_per_pos", "Proposed tokens accepted, by position", labels=["position"]
    )
    for position, number in enumerate(num_accepted):
        family.add_metric([str(position)], number)
    return family


def arms(control: ControlClient) -> Iterator[Metric]:
    """The table in use, by range of batch sizes."""
    labels = ["batch_min", "batch_max"]
    length = GaugeMetricFamily("speclen_speculation_length", "Draft tokens of the arm in use", labels=labels)
    ngram = GaugeMetricFamily("speclen_ngram", "1 where the arm in use has n-grams", labels=labels)
    for choice in control.table.choices:
        sizes = [str(choice.batch_min), str(choice.batch_max)]
        length.add_metric(sizes, choice.arm.speculation_length)
        ngram.add_metric(sizes, float(choice.arm.ngram))
    yield from (length, ngram)


class Labelled:
    """Collects another registry, with labels added to every sample."""

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
    """The registry that Prometheus reads: the given one, labelled, and the process's."""
    page = CollectorRegistry()
    page.register(Labelled(registry, {"model_name": model_name}))
    ProcessCollector(registry=page)
    PlatformCollector(registry=page)
    return page
