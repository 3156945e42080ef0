"""What the scheduler of vLLM calls at every step: a length to draft, a report of what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import structlog

from speclen.integrations.vllm.background import Reporting
from speclen.integrations.vllm.steps import Request, Sampled, Scheduled, StepTracker
from speclen.worker.engine.length_chooser import LengthChoice
from speclen.worker.reporting.control_client import ControlClient

log = structlog.get_logger()

NUM_TIMED = 8192  # the latest steps, whose own cost is remembered


class Steering:
    """One scheduler's lengths. Its methods are called from the engine's thread and wait for nothing."""

    def __init__(self, control: ControlClient, tracker: StepTracker, reporting: Reporting) -> None:
        self.control = control
        self.tracker = tracker
        self.reporting = reporting
        self.num_reported = 0
        self._held: LengthChoice | None = None
        self._choosing_s: deque[float] = deque(maxlen=NUM_TIMED)
        self._reporting_s: deque[float] = deque(maxlen=NUM_TIMED)

    def scheduled(self, output: Scheduled, requests: Mapping[str, Request], waiting: bool, started: float) -> None:
        """Set how many tokens the step drafts, by the number of rows that will decode in the next one."""
        begin = time.perf_counter()
        step = self.tracker.scheduled(output, requests, started)
        if step is None:
            return
        choice = self._choose(step.num_next, waiting)
        self.tracker.drafts(step, choice)
        output.num_spec_tokens_to_schedule = choice.speculation_length
        self._choosing_s.append(time.perf_counter() - begin)

    def _choose(self, num_rows: int, waiting: bool) -> LengthChoice:
        """A probe is held for a second step: only one that verifies and drafts its length teaches time."""
        if self._held is not None:
            choice, self._held = self._held, None
            return choice
        rows = min(max(num_rows, 1), self.control.card.max_batch_size)
        choice = self.control.choice_for(rows, with_prompts=waiting)
        if choice.probe_id:
            self._held = LengthChoice(choice.speculation_length, choice.decision_version)
        return choice

    def finished(self, output: Scheduled, sampled: Sampled, ended: float, busy: bool) -> None:
        """Report a step. ended: when its result was there; busy: whether requests go on."""
        begin = time.perf_counter()
        found = self.tracker.finished(output, sampled, ended, busy)
        if found is not None:
            self.control.report(*found)
            self.num_reported += 1
        self._reporting_s.append(time.perf_counter() - begin)

    def stop(self) -> None:
        """End reporting, and say what it came to."""
        self.reporting.stop()
        log.info("lengths were chosen and steps reported", **self.cost())

    def cost(self) -> dict[str, float | int]:
        """Steps reported, and what choosing and reporting cost of a step, in microseconds, over the latest steps."""
        choosing, reporting = sorted(self._choosing_s), sorted(self._reporting_s)
        if not choosing or not reporting:
            return {"steps": self.num_reported}
        mean = sum(choosing) / len(choosing) + sum(reporting) / len(reporting)
        half, high = (quantile(choosing, q) + quantile(reporting, q) for q in (0.5, 0.99))
        return {
            "steps": self.num_reported,
            "left_out": self.tracker.num_odd,
            "mean_us": round(1e6 * mean, 1),
            "median_us": round(1e6 * half, 1),
            "p99_us": round(1e6 * high, 1),
        }


def quantile(ascending: list[float], share: float) -> float:
    return ascending[int(share * (len(ascending) - 1))]
