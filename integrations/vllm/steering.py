"""Hooks that the scheduler of vLLM calls at every step: one sets the length to draft, one reports the outcome."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import structlog

from speclen.integrations.vllm.background import Reporting
from speclen.integrations.vllm.lengths import CautiousLengths
from speclen.integrations.vllm.steps import Request, Sampled, Scheduled, StepTracker
from speclen.worker.reporting.control_client import ControlClient

log = structlog.get_logger()

NUM_COSTS = 10_000  # of the newest steps are kept


class Cost:
    """Seconds that choosing and reporting take in a step. Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=NUM_COSTS)
        self.add = self._newest.append

    def quantile(self, share: float) -> int:
        """Microseconds that so many of the steps cost at most, 0 without any."""
        costs = sorted(self._newest.copy())
        return round(1e6 * costs[min(int(share * len(costs)), len(costs) - 1)]) if costs else 0


class Steering:
    """One scheduler's lengths. Its methods are called from the engine's thread and wait for nothing."""

    def __init__(
        self, control: ControlClient, tracker: StepTracker, lengths: CautiousLengths, reporting: Reporting
    ) -> None:
        self.control = control
        self.tracker = tracker
        self.lengths = lengths
        self.reporting = reporting
        self.num_reported = 0
        self.cost = Cost()
        self._so_far_s = 0.0  # of steps under way

    def scheduled(self, output: Scheduled, requests: Mapping[str, Request], waiting: bool, started: float) -> None:
        """Set how many tokens the step drafts, by the number of sequences that will decode in the next one.

        waiting: True if requests wait while a slot is free. In a step without prefill it was not the step's size that left
        them out, but a full KV cache or a pause: that may last, so they do not hold up probes.
        """
        begin = time.perf_counter()
        step = self.tracker.scheduled(output, requests, started)
        if step is None:
            return
        rows = min(max(step.num_next, 1), self.control.card.limits.max_batch_size)
        is_next = waiting and step.shape.with_prefill
        with_prefill = is_next or step.num_next < len(output.num_scheduled_tokens)
        choice = self.lengths.choice(rows, self.control.choose(rows, with_prefill))
        self.tracker.drafts(step, choice)
        output.num_spec_tokens_to_schedule = choice.arm.speculation_length
        self._so_far_s += time.perf_counter() - begin

    def arrived(self, output: Scheduled, requests: Mapping[str, Request], ended: float) -> None:
        """The result of a step is there, since `ended`. Called before vLLM looks at it."""
        begin = time.perf_counter()
        self.tracker.arrived(output, requests, ended)
        self._so_far_s += time.perf_counter() - begin

    def finished(self, sampled: Sampled, busy: bool) -> None:
        """Report the step that arrived. busy: True if requests go on."""
        begin = time.perf_counter()
        found = self.tracker.finished(sampled, busy)
        if found is not None:
            self.lengths.note(found)
            self.control.report(found)
            self.num_reported += 1
        self.cost.add(self._so_far_s + time.perf_counter() - begin)
        self._so_far_s = 0.0

    def stop(self) -> None:
        """End reporting, and say what it came to."""
        self.reporting.stop()
        self.tell()

    def abandon(self) -> None:
        """End reporting, and wait for nothing: the controller is not to believe in a worker that tells nothing any more."""
        self.reporting.abandon()

    def tell(self) -> None:
        """Say in the log how much was reported, and what it cost."""
        log.info(
            "steps reported",
            steps=self.num_reported,
            left_out=self.tracker.num_odd,
            median_us=self.cost.quantile(0.5),
            p99_us=self.cost.quantile(0.99),
        )
