"""Metrics of whole requests, under vLLM's names with the prefix `speclen_`; updated on the event loop."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from speclen.worker.observing.metrics import WorkerMetrics
from speclen.worker.requests.request import FinishReason, RefusedError, SequenceOutput

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# Reasons of errors: a wrong field, a refusal, or an internal error.
INVALID, INTERNAL = "invalid", "internal"
REASONS = (INVALID, *(kind.reason for kind in RefusedError.__subclasses__()), INTERNAL)


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
            self.success.labels(reason.value)  # there from the start, at zero
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
        """The timeline of one request. arrived_at: by time.monotonic; None: now."""
        return RequestTimeline(self, num_sequences, time.monotonic() if arrived_at is None else arrived_at)


class RequestTimeline:
    """Times of one request, observed at its end."""

    def __init__(self, metrics: RequestMetrics, num_sequences: int, arrived_at: float) -> None:
        self._metrics = metrics
        self._num_unfinished = num_sequences
        self._num_tokens = 0
        self._between_s, self._num_between = 0.0, 0  # from first to last tokens of sequences that have ended
        self._arrived_at = arrived_at
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._begun_at: dict[int, float] = {}  # by sequence, of its first token
        self._newest_at: dict[int, float] = {}  # and of its newest ones

    def saw(self, output: SequenceOutput) -> None:
        """Note every output of the request, in order."""
        if output.num_completion_tokens:
            self._stepped(output)
        if output.finish_reason is not None:
            self._ended(output)

    def abandon(self) -> None:
        """Count unfinished sequences as aborted; without effect after the end."""
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
