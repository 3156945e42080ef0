"""Prometheus metrics of a worker and of its requests, under vLLM's names with the prefix `speclen_`.

Counters and gauges of the engine are read at each scrape; the others are updated on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric

from speclen.process.credentials import ServerSecurity
from speclen.process.servers import Families, serve_page
from speclen.worker.engine.engine import Engine
from speclen.worker.reporting.control_client import ControlClient
from speclen.worker.requests.request import FinishReason, RefusedError, SequenceOutput

FAMILIES = Families("speclen")
LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# Reasons why requests end with an error: a wrong field, a refusal, or an internal error.
INVALID, INTERNAL = "invalid", "internal"
REASONS = (INVALID, *(kind.reason for kind in RefusedError.__subclasses__()), INTERNAL)


class WorkerMetrics:
    """The worker's registry and metrics page, and the collector of counts of the engine and the control client."""

    def __init__(
        self,
        engine: Engine,
        control: ControlClient,
        num_failures: dict[str, int] | None = None,
        num_at_admission: Callable[[], int] = lambda: 0,
    ) -> None:
        """num_failures: restarts of each part of the process."""
        self._engine = engine
        self._control = control
        self._num_failures = {} if num_failures is None else num_failures
        self._num_at_admission = num_at_admission
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._thread: threading.Thread | None = None  # serves the page
        self.slow_readers = Counter(
            "speclen_slow_readers", "Requests ended because their client read nothing", registry=self.registry
        )

    def serve(self, address: str, security: ServerSecurity, page: CollectorRegistry) -> None:
        """Serve the page on HOST:PORT from a thread. Raises OSError if the port is taken, ValueError if it is malformed."""
        self._thread = serve_page(address, page, security).thread

    async def keep_page(self, address: str, security: ServerSecurity, page: CollectorRegistry) -> None:
        """Serve the page, unless it is served already, until its thread ends. Raises as `serve`."""
        if self._thread is None or not self._thread.is_alive():
            self.serve(address, security, page)
        while self._thread is not None and self._thread.is_alive():
            await asyncio.sleep(1.0)

    def collect(self) -> Iterator[Metric]:
        load, control, gauge, counter = self._engine.load(), self._control, FAMILIES.gauge, FAMILIES.counter
        yield gauge("num_requests_running", "Requests being decoded or prefilled", load.num_running)
        yield gauge("num_requests_waiting", "Requests waiting for a slot", load.num_waiting + self._num_at_admission())
        usage = load.num_kv_tokens_used / load.num_kv_tokens_total if load.num_kv_tokens_total else 0.0
        yield gauge("kv_cache_usage_perc", "Share of KV tokens in use", usage)
        yield counter("prefix_cache_queries", "Prompt tokens that were looked up", load.num_looked_up_tokens)
        yield counter("prefix_cache_hits", "Prompt tokens that were cached and not prefilled", load.num_reused_tokens)
        yield counter("generation_tokens", "Tokens generated", load.num_generated_tokens)
        yield counter("spec_decode_num_drafts", "Proposals verified, of one sequence in one step", load.num_drafts)
        yield counter("spec_decode_num_draft_tokens", "Tokens proposed", load.num_draft_tokens)
        yield counter("spec_decode_num_ngram_tokens", "N-gram tokens proposed", load.num_ngram_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Proposed tokens accepted", load.num_accepted_tokens)
        by_position = {(str(at),): number for at, number in enumerate(load.num_accepted_by_position)}
        words = "Proposed tokens accepted, by position"
        yield FAMILIES.counters("spec_decode_num_accepted_tokens_per_pos", words, ["position"], by_position)
        yield gauge("cpu_threads", "CPU threads that the models use", self._engine.num_threads)
        yield counter("decode_steps", "Decoding steps", load.num_steps)
        yield counter("decode_step_seconds", "Wall time of decoding steps, all that belongs to them", control.step_s)
        yield from arms(control)
        yield gauge("controller_connected", "1 while reports reach the controller", float(control.connected))
        yield gauge("reports_buffered", "Reports kept until durable", len(control.buffer))
        yield counter("reports_dropped", "Reports given up for lack of room", control.buffer.num_dropped)
        yield counter("reports_refused", "Reports the controller refused", control.num_refused)
        failures = {(part,): number for part, number in sorted(dict(self._num_failures).items())}
        yield FAMILIES.counters("part_failures", "Parts that ended and were started again", ["part"], failures)


def arms(control: ControlClient) -> Iterator[Metric]:
    """The table in use, by batch range."""
    labels = ["batch_min", "batch_max"]
    by_sizes = {(str(each.batch_min), str(each.batch_max)): each.arm for each in control.table.choices}
    lengths = {sizes: arm.speculation_length for sizes, arm in by_sizes.items()}
    ngrams = {sizes: float(arm.ngram) for sizes, arm in by_sizes.items()}
    yield FAMILIES.gauges("speculation_length", "Draft tokens of the arm in use", labels, lengths)
    yield FAMILIES.gauges("ngram", "1 where the arm in use has n-grams", labels, ngrams)


class Labelled:
    """Collects from another registry, and adds labels to every sample."""

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
    """The registry behind the metrics page: the given one, with the model's name as label, and the process's metrics."""
    page = CollectorRegistry()
    page.register(Labelled(registry, {"model_name": model_name}))
    ProcessCollector(registry=page)
    PlatformCollector(registry=page)
    return page


class RequestMetrics:
    """Histograms and counters of requests. Times in seconds, lengths in tokens."""

    def __init__(self, worker: WorkerMetrics) -> None:
        registry = worker.registry
        self.worker = worker
        self.prompt_tokens = Counter(
            "speclen_prompt_tokens", "Tokens of prompts, remembered ones included", registry=registry
        )
        self.success = Counter(
            "speclen_request_success", "Sequences that have ended, by reason", ["finished_reason"], registry=registry
        )
        for reason in FinishReason:
            self.success.labels(reason.value)  # exists from the start, at zero
        self.refused = Counter(
            "speclen_request_refused", "Requests that ended with an error, by reason", ["reason"], registry=registry
        )
        for refusal in REASONS:
            self.refused.labels(refusal)
        self.time_to_first_token = seconds("time_to_first_token", "From arrival to the first token", registry)
        self.step_gap = seconds("inter_token_latency", "Between two steps that gave tokens", registry, STEP_BUCKETS)
        self.token_time = seconds(
            "request_time_per_output_token", "Mean time between tokens of a request's sequences", registry, STEP_BUCKETS
        )
        self.e2e_latency = seconds("e2e_request_latency", "From arrival to the last token", registry)
        self.queue_time = seconds("request_queue_time", "From arrival to a slot", registry)
        self.prefill_time = seconds("request_prefill_time", "From a slot to the first token", registry)
        self.decode_time = seconds("request_decode_time", "From the first token to the last", registry)
        self.inference_time = seconds("request_inference_time", "From a slot to the last token", registry)
        self.num_prompt_tokens = tokens("request_prompt_tokens", "Tokens of a prompt", registry)
        self.num_generation_tokens = tokens("request_generation_tokens", "Tokens generated for a request", registry)

    def refuse(self, error: Exception) -> None:
        """Count a request that ends with the error."""
        unforeseen = INVALID if isinstance(error, ValueError) else INTERNAL
        self.refused.labels(error.reason if isinstance(error, RefusedError) else unforeseen).inc()

    def timeline(self, num_sequences: int, arrived_at: float | None = None) -> RequestTimeline:
        """A timeline for one request. arrived_at: by time.monotonic; None: now."""
        return RequestTimeline(self, num_sequences, time.monotonic() if arrived_at is None else arrived_at)


class RequestTimeline:
    """Measures the times of one request, and observes them in the histograms when it ends."""

    def __init__(self, metrics: RequestMetrics, num_sequences: int, arrived_at: float) -> None:
        self._metrics = metrics
        self._num_unfinished = num_sequences
        self._num_tokens = 0
        self._between_s, self._num_between = 0.0, 0  # time between first and last tokens of ended sequences; intervals
        self._arrived_at = arrived_at
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._begun_at: dict[int, float] = {}  # by sequence, time of its first token
        self._newest_at: dict[int, float] = {}  # by sequence, time of its newest tokens

    def saw(self, output: SequenceOutput) -> None:
        """Note an output of the request. Called with every one, in order."""
        if output.num_completion_tokens:
            self._stepped(output)
        if output.finish_reason is not None:
            self._ended(output)

    def abandon(self) -> None:
        """Count unfinished sequences as aborted. After the end of the request this has no effect."""
        self._metrics.success.labels(FinishReason.ABORT.value).inc(self._num_unfinished)
        self._num_unfinished = 0

    def _stepped(self, output: SequenceOutput) -> None:
        if self._first_token_at is None:
            self._first_token_at, self._admitted_at = output.made_at, output.admitted_at
            self._metrics.time_to_first_token.observe(output.made_at - self._arrived_at)
        self._begun_at.setdefault(output.index, output.made_at)
        before = self._newest_at.get(output.index)
        if before is None or output.token_ids:
            self._newest_at[output.index] = output.made_at
            if before is not None:
                self._metrics.step_gap.observe(output.made_at - before)

    def _ended(self, output: SequenceOutput) -> None:
        assert output.finish_reason is not None
        self._metrics.success.labels(output.finish_reason.value).inc()
        self._num_tokens += output.num_completion_tokens
        if output.num_completion_tokens > 1:
            self._between_s += output.made_at - self._begun_at[output.index]
            self._num_between += output.num_completion_tokens - 1
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._all_ended(output.num_prompt_tokens, output.made_at)

    def _all_ended(self, num_prompt_tokens: int, ended_at: float) -> None:
        metrics = self._metrics
        metrics.e2e_latency.observe(ended_at - self._arrived_at)
        if self._first_token_at is None or self._admitted_at is None:
            return
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.queue_time.observe(self._admitted_at - self._arrived_at)
        metrics.prefill_time.observe(self._first_token_at - self._admitted_at)
        metrics.decode_time.observe(ended_at - self._first_token_at)
        metrics.inference_time.observe(ended_at - self._admitted_at)
        if self._num_between:
            metrics.token_time.observe(self._between_s / self._num_between)
        metrics.num_prompt_tokens.observe(num_prompt_tokens)
        metrics.num_generation_tokens.observe(self._num_tokens)


def seconds(
    name: str, text: str, registry: CollectorRegistry, buckets: tuple[float, ...] = LATENCY_BUCKETS
) -> Histogram:
    return Histogram(f"speclen_{name}_seconds", text, buckets=buckets, registry=registry)


def tokens(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"speclen_{name}", text, buckets=TOKEN_BUCKETS, registry=registry)
